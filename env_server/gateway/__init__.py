"""A gateway: a server whose environments are on others, which registered; `operations` and `process` enter."""
