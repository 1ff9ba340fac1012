"""The bus: typed calls and feeds over NATS, or in memory; the only package that knows NATS."""
