"""The HTTP API of the daemon: bodies and client. Needs neither torch nor a web framework."""
