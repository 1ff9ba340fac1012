"""Parsers of model output: content, reasoning and tool calls, incrementally."""
