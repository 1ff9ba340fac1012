"""Sessions: what was said before, so that a request may go on from it, at any gateway."""
