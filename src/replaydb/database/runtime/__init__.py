"""Transactions, prepared statements, and what an engine provides for them."""
