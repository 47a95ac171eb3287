"""The console: a page for people, on static files that the server ships."""
