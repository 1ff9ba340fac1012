"""The worker's protocols as pure state machines: held requests, token messages, requeueing."""
