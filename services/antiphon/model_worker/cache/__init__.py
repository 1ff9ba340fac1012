"""Which page holds which token of which request. Knows ids only: no torch, no bytes."""
