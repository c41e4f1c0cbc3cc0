"""What a store's documents show of a run: its goodput, its tensors, and the difference of two checkpoints."""
