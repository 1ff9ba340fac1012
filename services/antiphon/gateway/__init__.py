"""The gateway: serves clients over HTTP and NATS, and owns their requests."""
