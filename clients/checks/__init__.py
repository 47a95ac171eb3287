"""Checks of an author's environment; entered by the audit and by `roll-env check`."""
