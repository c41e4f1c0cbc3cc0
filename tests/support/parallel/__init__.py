"""One small transformer under every parallelism torch has, in real gloo processes on the CPU.

model and data are the same in every layout; layouts build them; referee gathers the whole state with torch's own
means; host and runner run scenarios in forked ranks; matrix saves in one layout and restores in another.
"""
