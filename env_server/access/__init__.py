"""Who calls, what they may do, and how much of it; every room from `sessions` up enters."""
