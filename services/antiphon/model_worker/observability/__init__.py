"""Metrics, load statistics, logs, the watchdog, and recordings of plans."""
