"""A worker of several processes: ranks compute the same plans, each with a shard of the model."""
