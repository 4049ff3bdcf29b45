"""Comparison of replaydb with other stores, on the same groups: `python -m benchmarks.peers`."""
