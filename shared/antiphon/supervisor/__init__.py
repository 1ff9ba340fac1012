"""`antiphon serve`: NATS and all services as processes on one machine."""
