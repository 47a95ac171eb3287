"""What is counted, logged and traced, as plain numbers and records; every room but `common` and `messages` enters."""
