"""Checkpoints for training frameworks: one module per framework, which alone imports it."""
