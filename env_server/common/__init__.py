"""What every room uses: the settings, and small parts that know nothing of the server; all enter."""
