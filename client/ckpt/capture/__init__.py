"""Capture: from live objects to named leaves, and back. The only stage that knows what a model is."""
