"""Records of requests: a log, a file of metrics, and what a crash leaves behind."""
