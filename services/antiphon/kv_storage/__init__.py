"""KV page storage outside the workers: memory, then disk; any page may be lost at any time."""
