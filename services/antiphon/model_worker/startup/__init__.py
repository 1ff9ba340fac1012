"""From settings to an engine that is ready to run."""
