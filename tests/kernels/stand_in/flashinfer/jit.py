class MissingJITCacheError(RuntimeError):
    """A module is not built, and must not be compiled."""
