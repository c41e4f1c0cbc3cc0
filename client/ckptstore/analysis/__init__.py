"""Analyses of a run from the documents of its store: goodput, tensors, and the difference of two checkpoints."""
