"""Registered servers, whatever protocol they speak; the gateway enters, and what puts it together."""
