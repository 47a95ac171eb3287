"""The sessions of one I/O process, and the journals that rebuild them; `gateway`, `operations` and above enter."""
