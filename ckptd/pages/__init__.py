"""The dashboard: pages for people, drawn by the daemon. They show, and change nothing.

`routes` answers requests, with what the services say; the views (runs, checkpoints, restores, treemap, charts) are pure
functions from that to what the templates show.
"""
