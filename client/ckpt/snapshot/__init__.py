"""What runs in the trainer during a save: copy the state to host memory and hand it to the saver."""
