"""The dashboard: read-only HTML pages that the daemon renders.

`routes` answers requests with data from the services; the views (runs, contents, restores, ...) are pure functions from
that data to the values that the templates show.
"""
