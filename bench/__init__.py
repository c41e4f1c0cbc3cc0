"""Benchmarks: python -m bench NAME. Nothing here is imported by the product."""
