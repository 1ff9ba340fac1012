"""How models mark their thinking: one format a file."""
