"""Latency as a function of buffer size and of concurrent load."""
