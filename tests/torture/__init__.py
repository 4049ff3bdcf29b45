"""Attacks on the promises of docs/consistency.md: `make torture`, and a minute of it in tests."""
