"""Logs, metrics and traces. Takes plain arguments: it knows neither settings nor messages."""
