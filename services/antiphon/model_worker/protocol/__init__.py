"""The worker's side of the protocols: what it holds, sends and hands back, as pure state machines."""
