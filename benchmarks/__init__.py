"""Benchmarks of replaydb: `python -m benchmarks --help`."""
