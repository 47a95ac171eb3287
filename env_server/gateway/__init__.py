"""A gateway: a server whose environments are on other servers, which registered over HTTP."""
