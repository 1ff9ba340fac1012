"""The worker's protocols as pure state machines: requests that it holds, sends and requeues."""
