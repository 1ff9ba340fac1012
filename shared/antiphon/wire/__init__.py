"""Messages on the bus, their subjects, and the errors that calls may return."""
