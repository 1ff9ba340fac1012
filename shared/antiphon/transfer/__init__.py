"""Transfer of payloads too large for the broker."""
