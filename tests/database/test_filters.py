"""Meaning of filters, which is the same on both engines, and refusal of invalid ones."""

from __future__ import annotations

import pickle  # as for the workers of a DataLoader
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.compiler import compiles

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.database.filters.compiling import MAX_DEPTH, checked
from replaydb.database.filters.group_columns import COLUMNS
from replaydb.database.filters.terms import FUNCTIONS
from replaydb.database.tables import schema
from support.conditions import KEYS, Condition, conditions, stored_tags
from support.connections import transaction
from support.engines import postgresql_nightly
from support.examples import examples
from support.groups import group


@settings(
    max_examples=examples(25),
    deadline=None,
    # No shrinking: the message shows the filter, and a smaller example takes minutes to find.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    several=st.lists(stored_tags, min_size=8, max_size=8),
    filters=st.lists(conditions, min_size=12, max_size=12),
)
async def test_any_filter_finds_what_python_finds(
    store: Store, several: list[dict[str, Any]], filters: list[Condition]
) -> None:
    number = len(await store.buffers())
    buffer = await store.buffer(f"buffer-{number}")
    indexed = await store.buffer(f"indexed-{number}", indexed_tags=KEYS)
    ids = await buffer.put([group(tags=tags) for tags in several])
    await indexed.put([group(tags=tags) for tags in several])
    for condition in filters:
        expected = [
            one for one, tags in zip(ids, several, strict=True) if condition.holds({"tags": tags})
        ]
        for one in (buffer, indexed):
            found = await one.count(where=condition.sql)
            shown = f"{condition.sql} {condition.sql.compile().params} {several}"
            assert found == len(expected), f"{one.name} {shown}"


TAGS: dict[str, dict[str, Any]] = {
    "hard": {"level": "hard", "n": 5, "ok": True, "deep": {"key": [10, {"x": "it's 100%"}]}},
    "easy": {"level": "easy", "n": 2.5, "ok": False, "big": 2**53 + 1},
    "text": {"level": "HARD", "n": "4", "ok": "true", "big": 2.0**53},
    "null": {"level": None, "n": None, "ok": None, "big": 1e300, "难度": 'a"b\\'},
    "none": {"n": -0.0, "big": 2**64 - 1},
}
one, tags = rdb.col.id, rdb.col.tags
MEANINGS: list[tuple[Any, str]] = [
    (tags["level"] == "hard", "hard"),
    (tags["level"] != "hard", "easy text"),
    (~(tags["level"] == "hard"), "easy text"),
    (tags["level"] < "a", "text"),
    (tags["level"].is_(None), "null none"),
    (tags["level"] == None, "null none"),  # noqa: E711
    (tags["level"].is_not(None), "hard easy text"),
    (tags["level"].in_(["hard", "easy", 5]), "hard easy"),
    (tags["level"].not_in(["hard", 5]), "easy text"),
    (tags["level"].in_([]), ""),
    (tags["level"].between("a", "f"), "easy"),
    (tags["level"].like("_ar%"), "hard"),
    (tags["level"].ilike("_ar%"), "hard text"),
    (tags["level"].startswith("h"), "hard"),
    (sa.func.lower(tags["level"]) == "hard", "hard text"),
    (sa.func.coalesce(tags["level"], "hard") == "hard", "hard null none"),
    (tags["n"] > 3, "hard"),
    (tags["n"] > 2.4, "hard easy"),
    (tags["n"] == 0, "none"),
    (tags["n"] == 5.0, "hard"),
    (tags["n"] == "4", "text"),
    (tags["n"] == True, ""),  # noqa: E712
    (tags["n"].as_string() == "5", ""),
    (tags["n"].as_integer() > 0, "hard"),
    (tags["n"].as_float() * 2 == 5, "easy"),
    (tags["n"].between(1, 3), "easy"),
    (tags["n"] == rdb.col.num_tokens - 5, "hard"),
    (tags["ok"].as_boolean(), "hard"),
    (~tags["ok"].as_boolean(), "easy"),
    (tags["ok"] == True, "hard"),  # noqa: E712
    (tags["ok"].in_([False]), "easy"),
    (tags["ok"].is_not(True), "easy text null none"),
    (tags["ok"] == "true", "text"),
    (tags["ok"] == 1, ""),
    (tags["big"] == 2**53 + 1, "easy text"),
    (tags["big"] == 2**53, "text"),
    (tags["big"] == 2.0**53, "easy text"),
    (tags["big"] >= 1e300, "null"),
    (tags["big"] == 2.0**64, "none"),
    (tags["big"].as_integer() > 0, "easy"),
    (tags["deep"]["key"][0] == 10, "hard"),
    (tags["deep", "key", 1, "x"].contains("'s 100%"), "hard"),
    (tags["deep"]["key"]["0"] == 10, ""),
    (tags["deep"]["key"].is_(None), "easy text null none"),
    (tags["level"]["x"] == "hard", ""),
    (tags["难度"] == 'a"b\\', "null"),
    (rdb.col.group_uid.like("%X%"), ""),
    (rdb.col.group_uid.contains("_"), ""),
    (rdb.col.group_uid < "h", "easy"),
    (rdb.col.num_tokens > 9.5, "hard easy text null none"),
    (rdb.col.num_tokens > 2**40, ""),
    (rdb.col.num_tokens % 3 == 1, "hard easy text null none"),
    (rdb.col.num_tokens * 2 + tags["n"] + 1 == 26, "hard"),
    ("a-" + tags["level"] + "-b" == "a-hard-b", "hard"),
    (tags["n"] + tags["n"] > 7, "hard"),
    (sa.func.abs(tags["n"]) + tags["n"] == 5, "easy"),
    (tags["level"].as_string() + tags["ok"] == "HARDtrue", "text"),
    (1 / (rdb.col.num_tokens - 10) > 0, ""),
    (sa.case((tags["n"] == 5, "a"), else_=tags["level"]).in_(["a", "easy"]), "hard easy"),
    (sa.func.nullif(tags["level"], "hard").is_(None), "hard null none"),
    (sa.func.abs(-rdb.col.priority) == 1, "hard easy text null none"),
    (sa.func.length(tags["level"]) == 4, "hard easy text"),
    (rdb.col.priority == np.float32(1.0), "hard easy text null none"),
    (rdb.col.group_status == rdb.GroupStatus.COMPLETED, "hard easy text null none"),
]


async def test_comparisons_depend_on_the_kind_of_value(buffer: Buffer) -> None:
    await buffer.put([group(uid, tags=one) for uid, one in TAGS.items()])
    for where, expected in MEANINGS:
        found = await buffer.count(where=where)
        assert found == len(expected.split()), str(where)
        if found:
            batch = await buffer.sample(found, rdb.Fifo(), where=where)
            assert [one.group_uid for one in batch.groups] == expected.split(), str(where)
    await buffer.delete(where=tags["n"] > 3)
    assert await buffer.count() == 4


NESTINGS: list[Callable[[Any], Any]] = [
    lambda inner: sa.func.coalesce(one, inner),
    lambda inner: 1 / inner,
    lambda inner: sa.case((tags["n"] > inner, 1), else_=0),
    lambda inner: sa.func.length(sa.case((inner > 1, "a"), else_=tags["level"])),
]


@pytest.mark.parametrize(
    ("engine_name", "nest"),
    [
        pytest.param(engine, nest, marks=() if number % 2 == odd else pytest.mark.nightly)
        for odd, engine in enumerate(("sqlite", "postgresql"))
        for number, nest in enumerate(NESTINGS)
    ],
)
async def test_engines_accept_the_deepest_allowed_filters(
    buffer: Buffer, nest: Callable[[Any], Any]
) -> None:
    await buffer.put(group())
    deepest = nest(one)
    for _ in range(MAX_DEPTH):
        try:
            await buffer.sample(1, where=deepest > 0, max_staleness=1, runs="test")
        except rdb.NotEnoughGroupsError:
            deepest = nest(deepest)
        except rdb.InvalidInputError:
            break
    else:
        raise AssertionError("never too deep")
    await buffer.count(where=one.in_(list(range(10_000))))
    await buffer.count(where=sa.or_(*(tags["n"] == i for i in range(300))))


@pytest.mark.parametrize("where", [rdb.col.task_name < "b", sa.func.lower(tags["level"]) == "a"])
def test_comparisons_are_independent_of_the_locale(where: sa.ColumnElement[bool]) -> None:
    """The SQL is checked, because the server of the tests may have no locale."""
    condition = checked(where)
    assert condition is not None
    import_module("replaydb.database.postgresql.backend")
    dialect = sa.make_url("postgresql+asyncpg://").get_dialect()()
    assert ' COLLATE "C"' in str(condition.compile(dialect=dialect))


async def test_damaged_tags_fail_no_other_group(sqlite_url: str) -> None:
    async with Store.open(sqlite_url) as store:
        buffer = await store.buffer("math")
        ids = await buffer.put([group(tags={"n": 1}), group(tags={"n": 1})])
        async with transaction(sqlite_url) as connection:
            damaged = sa.update(schema.episode_group).where(one == ids[0])
            await connection.execute(damaged.values(tags=sa.type_coerce('{"n": ', sa.Text)))
        assert await buffer.count(where=tags["n"] == 1) == 1


def nested(nest: Callable[[Any], Any], depth: int) -> Any:
    """Return an expression nested to a depth, with the id of the group at the bottom."""
    inner: Any = one
    for _ in range(depth):
        inner = nest(inner)
    return inner


class Shifted(sa.TypeDecorator[int]):
    impl = sa.BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: sa.Dialect) -> int:
        return (value or 0) + 1


class Injected(sa.ColumnElement[bool]):
    type = sa.Boolean()
    inherit_cache = True


@compiles(Injected)
def _inject(*_: object, **__: object) -> str:
    return "1 = 1"


class Derived(sa.BindParameter[int]):
    inherit_cache = True


naive = datetime(2026, 1, 1)
REFUSED: list[Any] = [
    # Expressions with side effects, or that read more than the group.
    sa.func.pg_sleep(1) == None,  # noqa: E711
    sa.func.setval("episode_group_id_seq", one) > 0,
    sa.func.set_config("work_mem", "1", False) == "1",
    sa.func.load_extension("x") == 1,
    sa.func.random() > 0,
    sa.func.pg_catalog.lower(rdb.col.group_uid) == "a",
    sa.func.lower(rdb.col.group_uid, 1) == "a",
    sa.func.coalesce(one, sa.select(schema.buffer.c.id).scalar_subquery()) > 0,
    sa.func.count(one) > 0,
    sa.func.abs(one).over() > 0,
    sa.func.abs(one).filter(one > 1) > 0,
    one == sa.any_(sa.select(schema.buffer.c.id).scalar_subquery()),
    one.in_(sa.select(schema.buffer.c.id)),
    one.in_([rdb.col.staleness, 3]),
    sa.exists().where(schema.buffer.c.id == 1),
    schema.episode_group.alias().c.id == 1,
    schema.episode_group.to_metadata(sa.MetaData()).c.weight > 0,
    sa.table("episode_group", sa.column("id")).c.id == 1,
    schema.episode_group.c.buffer_id == 1,
    schema.episode_group.c.uniform_key > 0,
    schema.episode_group.c.weight > 0,
    # SQL text and types of the caller.
    one.op("||/**/")(1) == 1,
    one.bool_op("=")(1),
    sa.literal_column("1") == one,
    sa.text("1 = 1"),
    sa.and_(one > 1, sa.text("1 = 1")),
    rdb.col.group_uid.collate('C"; --') == "a",
    rdb.col.group_uid.regexp_match("(a+)+"),
    rdb.col.group_uid.match("a"),
    sa.cast(rdb.col.group_uid, sa.Integer) == 1,
    sa.type_coerce(one, sa.String) == "1",
    Injected(),
    ~Injected(),
    one == sa.literal(3, Shifted()),
    one == Derived(None, 3, unique=True),
    one == sa.bindparam("buffer_id", 3),
    one == sa.bindparam("given"),
    one == sa.bindparam(None, 3, literal_execute=True, unique=True),
    one == sa.bindparam(None, callable_=lambda: 3, unique=True),
    one.label("x") > 1,
    one.desc(),
    sa.distinct(one) == 1,
    sa.tuple_(one, one).in_([(1, 1)]),
    sa.func.length(rdb.col.group_uid, 2) == 1,
    one.between(1, 2, symmetric=True),
    one.bitwise_and(1) == 1,
    # Values that an engine cannot store, or that engines compare differently.
    one == 2**63,
    one > -(2**63) - 1,
    one.in_([1, 2**70]),
    one.in_(list(range(10_001))),
    one.in_([1, None]),
    one.between(None, 3),
    sa.literal(None) < one,
    rdb.col.priority > float("nan"),
    rdb.col.priority > float("inf"),
    rdb.col.priority > Decimal("0.1"),
    rdb.col.group_uid == "a\0b",
    rdb.col.group_uid.in_(["\ud800"]),
    rdb.col.group_uid == b"a",
    rdb.col.group_uid == 3,
    rdb.col.group_uid.like("a" * 1001),
    rdb.col.group_uid.like("a/", escape="/"),
    rdb.col.group_uid.like(rdb.col.task_name),
    rdb.col.reward_std > "a",
    rdb.col.has_transcript == 1,
    rdb.col.has_transcript > (one > 1),
    rdb.col.created_at > naive,
    rdb.col.created_at > "2026-01-01",
    rdb.col.deadline - rdb.col.created_at > timedelta(1),
    sa.case((one > 1, "a"), else_=1) == "a",
    sa.func.coalesce(rdb.col.prompt_uid, 1) == 1,
    one // 2 == 1,
    (tags["level"].as_float() + 1) % 2 == 1,
    # Tags.
    tags == {"level": "hard"},
    tags.is_(None),
    tags["level"],
    ~tags["level"],
    tags["level"] == {"a": 1},
    tags["level"] == ["a"],
    tags["level"] == tags["other"],
    tags["level"] == datetime(2026, 1, 1, tzinfo=UTC),
    tags["level"] == 2**64 - 1,
    tags["list"][-1] == 1,
    tags["a\0"] == 1,
    tags["\ud800"] == 1,
    tags[tuple("abcdefghijklmnopq")] == 1,
    tags[rdb.col.group_uid] == 1,
    tags["a"].as_numeric(10, 2) == 1,
    # Too many parts, or nested too deep.
    sa.or_(*(one == i for i in range(1000))),
    nested(lambda inner: sa.func.coalesce(one, inner), MAX_DEPTH - 1) > 1,
    one + sa.func.random() + 1 > 0,
]


@settings(max_examples=examples(60), deadline=None)
@given(condition=conditions)
def test_a_pickled_filter_has_the_same_meaning(condition: Condition) -> None:
    sent, original = (
        checked(one)
        for one in (pickle.loads(pickle.dumps(condition.sql)), condition.sql)  # noqa: S301
    )
    assert sent is not None
    assert original is not None
    assert sent.compare(original)


@postgresql_nightly
async def test_invalid_filters_are_refused_before_any_query(
    buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sqlalchemy.engine")
    for where in REFUSED:
        with pytest.raises(rdb.InvalidInputError) as caught:
            await buffer.count(where=where)
        assert caught.value.field == "where"
    assert not caplog.records


def test_filter_columns_are_complete_and_documented() -> None:
    """Every column is either internal or can be filtered, and the docs list the latter."""
    internal = {"buffer_id", "weight", "uniform_key", "priority_key", "is_evicted"}
    assert set(schema.episode_group.c.keys()) == COLUMNS.keys() | internal
    page = (Path(__file__).parents[2] / "docs" / "filters.md").read_text(encoding="utf8")
    table = page.partition("## Columns")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`(?=[^|]*\|[^|]*\|)", table)) == COLUMNS.keys()
    functions = page.partition("## Functions")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)\(", functions, flags=re.MULTILINE)) == set(FUNCTIONS)
