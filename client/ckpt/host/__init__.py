"""Locks, shared memory and free memory of this host."""
