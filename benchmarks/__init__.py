"""Benchmarks: one file per op family, and the end-to-end ones."""
