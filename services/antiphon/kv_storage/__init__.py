"""KV pages beyond the workers: in memory, then on disk; all of them may be lost at any time."""
