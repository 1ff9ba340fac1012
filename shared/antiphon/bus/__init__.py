"""The bus: typed calls and feeds over NATS or in memory; only this package imports NATS."""
