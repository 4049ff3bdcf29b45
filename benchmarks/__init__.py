"""Measurements of replaydb on this machine: `python -m benchmarks --help`."""
