"""The sessions of one I/O process: whose they are, when they end; `gateway`, `operations` and above enter."""
