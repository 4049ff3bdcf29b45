"""What can be looked at: a module for each view."""
