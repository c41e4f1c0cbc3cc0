"""Retention: policies, pins, prunes, two-phase deletion and scrubs."""
