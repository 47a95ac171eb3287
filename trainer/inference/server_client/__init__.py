"""The client of one inference server; `server_pool` and who makes clients enter."""
