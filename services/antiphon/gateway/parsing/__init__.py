"""Answers taken apart: content, reasoning and calls of tools, as the text comes in."""
