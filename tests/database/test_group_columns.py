"""`rdb.col`: its columns, their types, and the errors of unknown ones."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from sqlalchemy import ColumnElement

import replaydb as rdb
from replaydb.database.filters.group_columns import COLUMNS, GroupColumns
from replaydb.database.tables.schema import episode_group


def test_col_has_only_the_columns_of_filters() -> None:
    assert dir(rdb.col) == sorted(COLUMNS)
    assert all(getattr(rdb.col, name) is episode_group.c[name] for name in dir(rdb.col))
    assert repr(rdb.col) == "replaydb.col"


def test_column_types_match_the_table() -> None:
    is_mixed: ColumnElement[bool] = rdb.col.reward_std > 0.1
    is_hard: ColumnElement[bool] = rdb.col.tags["level"] == "hard"
    assert is_mixed is not is_hard
    hints = get_type_hints(GroupColumns)
    del hints["tags"]  # any JSON
    assert {name: get_args(hint)[0] for name, hint in hints.items()} == {
        name: getattr(column.type, "impl_instance", column.type).python_type
        for name, column in COLUMNS.items()
        if name != "tags"
    }


def test_an_unknown_column_suggests_a_similar_one() -> None:
    with pytest.raises(AttributeError, match="no column 'rewards_std'; did you mean 'reward_std'"):
        print(rdb.col.rewards_std)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no column 'xyzzy'$"):
        print(rdb.col.xyzzy)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="filters cannot use the column 'weight'"):
        print(rdb.col.weight)  # type: ignore[attr-defined]
    assert not hasattr(rdb.col, "uniform_key")


def test_col_cannot_be_changed() -> None:
    columns: Any = rdb.col
    with pytest.raises(AttributeError):
        columns.reward_std = 3
