"""Fuzz tests: payloads, filters and imported files that somebody else wrote (`make fuzz`)."""
