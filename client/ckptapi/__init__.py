"""What the daemon and its clients say to each other over HTTP. Needs neither torch nor a web framework."""
