"""The daemon: indexes the checkpoints of a store, serves them over HTTP, prunes and cleans up.

Layers, from the top: app (wiring) > api (HTTP, async) > services (rules, blocking) > index (SQL) | ckptstore.
It never loads torch.
"""
