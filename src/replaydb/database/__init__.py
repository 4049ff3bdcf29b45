"""The database layer: tables, statements, engines, and the repository that uses them."""
