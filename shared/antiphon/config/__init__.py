"""Configuration: one frozen struct per group, from flags, environment and YAML; with its docs."""
