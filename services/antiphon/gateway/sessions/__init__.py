"""Sessions: stored context that later requests continue from, at any gateway."""
