"""The client of ckptd, and what the two say to each other. Loads an HTTP client; nothing else here does."""
