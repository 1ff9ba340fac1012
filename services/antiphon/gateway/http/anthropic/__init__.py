"""The Messages API: bodies to asks, answers to content blocks and their events."""
