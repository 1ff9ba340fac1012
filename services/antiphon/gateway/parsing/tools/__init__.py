"""How models write calls of tools: one format a file."""
