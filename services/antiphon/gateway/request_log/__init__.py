"""Records of requests: a log, a metrics file, and crash dumps."""
