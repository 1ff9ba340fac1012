"""`antiphon serve`: NATS and every service as processes of one machine."""
