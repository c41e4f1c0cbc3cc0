"""The commands, one file per group. Each parses its arguments, calls the implementation, and prints the result."""
