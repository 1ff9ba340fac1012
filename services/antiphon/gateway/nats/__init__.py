"""The NATS API: `generate.<model>`, `embed.<model>`, resume and cancel."""
