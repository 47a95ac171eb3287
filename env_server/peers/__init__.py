"""The other I/O processes of one server, and how they call each other; `operations` enters."""
