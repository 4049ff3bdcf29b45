"""SQLAlchemy Core statements that several modules use. Values are bound, never written in.

A statement with one user is in the module of the user. Statements on one table are in the module of
its name, ordered reads of groups in `candidates`.
"""
