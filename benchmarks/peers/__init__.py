"""replaydb beside other stores, with the same groups, in one run: `python -m benchmarks.peers`."""
