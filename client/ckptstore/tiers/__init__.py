"""Tiers: a near store and a far one that hold checkpoints of the same runs, by the same protocol and names."""
