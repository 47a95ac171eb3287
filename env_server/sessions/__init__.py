"""The sessions of one I/O process: whose they are, when they end; `gateway`, `peers`, `operations` and above enter."""
