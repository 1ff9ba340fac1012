"""Models: a family is a declaration over one decoder, and weights are checked before they load."""
