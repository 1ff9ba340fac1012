"""The door over HTTP: OpenAI's routes, as JSON and as server-sent events."""
