"""Who runs in the next step. Pure: no torch, no bus, simulated by the thousand steps."""
