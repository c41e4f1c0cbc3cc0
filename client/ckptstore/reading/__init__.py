"""Reading checkpoints: sources, fetching of verified chunks, and verification of whole checkpoints."""
