"""Insertion of rows into any table."""

from __future__ import annotations

from functools import cache

from sqlalchemy import Insert, Table, TableClause, insert


@cache
def insert_into(table: TableClause) -> Insert:
    """Insert rows, given as dicts of their columns."""
    return insert(table)


@cache
def insert_one_into(table: Table) -> Insert:
    """Insert a row, given as a dict of its columns. Returns its id."""
    return insert(table).returning(table.c.id)
