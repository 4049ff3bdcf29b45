"""What a process that uses a store goes through."""
