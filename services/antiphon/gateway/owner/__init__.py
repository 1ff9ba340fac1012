"""The owner of requests: a pure state machine and its parts."""
