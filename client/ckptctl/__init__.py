"""The command line for operators of a store or a daemon. Loads neither torch nor a web framework by itself."""
