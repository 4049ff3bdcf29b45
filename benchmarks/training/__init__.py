"""The trainer's side: many of them, what they wait for, and what they hold."""
