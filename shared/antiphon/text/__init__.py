"""Text processing that several services share."""
