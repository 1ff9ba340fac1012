"""The door of a cluster, over HTTP and over NATS; owns each request that came through it."""
