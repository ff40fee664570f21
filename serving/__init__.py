"""The HTTP server and its protocols."""
