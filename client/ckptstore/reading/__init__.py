"""Reading checkpoints: from where, the fetching of verified chunks, and verification of whole checkpoints."""
