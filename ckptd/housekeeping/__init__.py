"""Background work of the daemon: recovery, garbage collection, scrubbing, policies, webhooks, leader election."""
