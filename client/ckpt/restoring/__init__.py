"""The restore path, one file per stage in order: resolve, plan, place; ckptstore.reading fetches and decodes.

pipeline joins them and agrees with the other ranks. Nothing live is changed before a plan is complete.
"""
