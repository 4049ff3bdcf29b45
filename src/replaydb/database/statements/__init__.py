"""SQLAlchemy Core statements, one small function each. Values are bound, never written in.

Statements on one table are in the module of its name. Ordered reads of groups are in `candidates`
and `pages`, aggregates in `counts` and `statistics`.
"""
