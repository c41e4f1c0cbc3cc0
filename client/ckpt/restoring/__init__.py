"""The restore path, one file per stage in order: resolve, plan, place; fetching and decoding are ckptstore.reading's.

pipeline joins them and agrees with the other ranks. Nothing live is changed before a plan is complete.
"""
