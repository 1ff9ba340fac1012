"""Settings, model card and device become the resolved configuration, each value with its reason."""
