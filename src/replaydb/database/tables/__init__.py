"""Tables, their column types and views, and SQL on single columns."""
