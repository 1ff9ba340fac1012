"""Answers of a given form: grammars are compiled beside the step, and followed in it."""
