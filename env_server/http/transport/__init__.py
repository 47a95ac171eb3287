"""All that knows uvicorn: its protocols with bounds, and servers that end as ours do."""
