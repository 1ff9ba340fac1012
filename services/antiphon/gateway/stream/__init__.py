"""Event streams from the owner to the response handlers."""
