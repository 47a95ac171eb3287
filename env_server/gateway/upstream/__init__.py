"""Registered servers, in whatever protocol they speak: the gateway alone enters."""
