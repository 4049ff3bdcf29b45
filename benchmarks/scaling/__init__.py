"""What becomes slower when there is more of it."""
