"""What is elsewhere: servers that registered, their sessions, and processes beside this one; `operations` enters."""
