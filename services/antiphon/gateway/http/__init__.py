"""The HTTP APIs, with JSON responses and server-sent events."""
