"""What the daemon does without a request: follow the store, recover, sweep, scrub, apply policies."""
