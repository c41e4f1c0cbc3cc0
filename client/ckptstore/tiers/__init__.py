"""Tiers: a local tier and a remote store that hold checkpoints of the same runs, by the same protocol and names."""
