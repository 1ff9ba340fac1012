"""What the embedded model can do, one skill a file."""
