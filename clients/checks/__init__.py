"""What an author's environment is checked for; entered by the audit and by `roll-env check`."""
