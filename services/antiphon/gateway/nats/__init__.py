"""The door over NATS: `generate.<model>`, resume and cancel."""
