"""What all sandboxes share: program, limits, result, the interface, and how facts become outcomes; all may enter."""
