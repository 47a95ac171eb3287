"""Learns from environments that it reaches over the wire."""
