"""Fault injection against the guarantees of docs/consistency.md (`make torture`)."""
