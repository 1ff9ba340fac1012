"""The owner of requests: a pure state machine, and the nouns it is made of."""
