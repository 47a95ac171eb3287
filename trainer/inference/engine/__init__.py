"""The embedded engine: plain torch in the process of the run or of a role; who makes clients enters."""
