"""The command line: what operators ask of a store or of a daemon. Never loads torch or a web framework by itself."""
