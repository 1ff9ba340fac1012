"""The run loop of every service: start, ready, drain, stop, with an answer for everybody."""
