"""Costs within one process: event loop, startup, delivery and the blocking API."""
