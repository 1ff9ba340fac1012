"""What weights are kept in: a file a format, each of which says what is where before it is read."""
