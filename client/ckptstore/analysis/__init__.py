"""What a store's documents tell about a run: its goodput, its tensors, and the difference of two checkpoints."""
