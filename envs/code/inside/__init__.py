"""What runs inside a sandbox: text that is sent there, so it uses nothing but the standard library."""
