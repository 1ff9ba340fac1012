"""Makes an engine that is ready to run from the settings."""
