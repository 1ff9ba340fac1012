"""Structured output: grammars are compiled off the loop, and matchers mask each decode step."""
