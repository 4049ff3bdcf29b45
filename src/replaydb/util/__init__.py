"""Small modules that know nothing of replaydb's domain."""
