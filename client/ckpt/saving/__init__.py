"""The save path, one file per stage in order: stage, encode, upload, commit. pipeline joins them.

stage runs on the training thread; everything after it in the saver process (or, with
writer="thread", in threads of this process). Only stage and client may load torch.
"""
