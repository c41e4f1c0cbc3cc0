"""The commands, one file per group. Each reads its arguments, calls what does the work, and shows the result."""
