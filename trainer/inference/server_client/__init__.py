"""The client of one inference server, vLLM or SGLang; `server_pool` and who makes clients enter."""
