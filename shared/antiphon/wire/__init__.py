"""The messages that cross the bus, their subjects, and the errors they may end in."""
