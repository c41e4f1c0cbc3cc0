"""The trainer's part of a save: copies the state to host memory and submits it to the saver."""
