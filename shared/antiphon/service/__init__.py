"""The run loop of every service: start, ready, drain, stop; every accepted call gets a reply."""
