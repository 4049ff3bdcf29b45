"""SQLAlchemy Core statements, one small function each. Values are bound, never written in."""
