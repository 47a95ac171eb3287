"""Another machine's sandbox, and `POST /run_code` as data; servers enter for the data, `selection` for the back-end."""
