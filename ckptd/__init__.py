"""The daemon: indexes what is committed in a store, serves it over HTTP, prunes and cleans up.

Layers, from the top: app (wiring) > api (HTTP, async) > services (rules, blocking) > index (SQL) | ckptstore.
It never loads torch.
"""
