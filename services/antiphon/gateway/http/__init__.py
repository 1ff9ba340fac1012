"""The door over HTTP: families of APIs, as JSON and as server-sent events."""
