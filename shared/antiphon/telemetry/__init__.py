"""Logs, metrics and traces. Independent of settings and messages: it takes plain arguments."""
