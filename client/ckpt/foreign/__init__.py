"""Checkpoints of other programs, read without executing anything in them, and written for other programs to read."""
