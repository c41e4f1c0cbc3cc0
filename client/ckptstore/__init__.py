"""Checkpoints on any fsspec store: names, documents, chunks, commit, reading, deletion.

This package is shared by the training library, the daemon and the command line.
It must never import torch, fastapi or sqlalchemy.
"""
