"""Reads checkpoints of other programs without executing code in them, and writes checkpoints for other programs."""
