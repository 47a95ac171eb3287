"""Tools that a policy calls by name: declared, read, and in environments; `verifiers` enters, and MCP."""
