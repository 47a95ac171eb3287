"""Tests of the console, which share a browser and a server (`conftest.py`)."""
