"""The contents of a store: the commit protocol, the catalog of checkpoints, and the claims on them. No HTTP."""
