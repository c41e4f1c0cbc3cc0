"""Data loaders whose position is part of a checkpoint: `ckpt.data.resumable(loader)`."""

from ckpt.data.loader import ResumableLoader, resumable

__all__ = ["ResumableLoader", "resumable"]
