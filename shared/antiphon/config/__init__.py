"""What the operator says: a frozen struct a concern; flags, environment, YAML and docs from it."""
