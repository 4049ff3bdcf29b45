"""XTuner's query language: all operators agree with Python's."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xtuner.v1.data_proto.rl_data import Status
from xtuner.v1.rl.replay_buffer import StorageItem

from integrations.xtuner.conftest import Open
from integrations.xtuner.states import state
from replaydb.integrations.xtuner.query import selection
from support.engines import both_engines
from support.examples import examples

TASKS = ["math", "code", "agent"]
STATUSES = list(Status)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "uid": st.integers(0, 40),
    "timestamp_id": st.integers(0, 40),
    "staleness": st.integers(-1, 5),
    "task_name": st.sampled_from(TASKS),
    "status": st.sampled_from(STATUSES),
}
COMPARE: dict[str, Any] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
    "$in": lambda one, several: one in several,
    "$not_in": lambda one, several: one not in several,
    "$between": lambda one, bounds: bounds[0] <= one <= bounds[1],
}


@st.composite
def simple(draw: st.DrawFn) -> dict[str, Any]:
    """Conditions on one field."""
    name = draw(st.sampled_from(sorted(FIELDS)))
    values = FIELDS[name]
    several = st.lists(values, max_size=3)
    if name == "status":  # statuses have no order
        ops = st.sampled_from(["$eq", "$ne"]).flatmap(lambda op: values.map(lambda one: {op: one}))
    else:
        ops = st.sampled_from(list(COMPARE)[:6]).flatmap(
            lambda op: values.map(lambda one: {op: one})
        ) | st.tuples(values, values).map(lambda both: {"$between": sorted(both)})
    sets = st.sampled_from(["$in", "$not_in"]).flatmap(
        lambda op: several.map(lambda found: {op: found})
    )
    return {name: draw(values | ops | sets)}


queries = st.recursive(
    simple(),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda several: {"$and": several})
        | st.lists(inner, max_size=3).map(lambda several: {"$or": several})
        | st.tuples(inner, inner).map(lambda two: two[0] | two[1])
    ),
    max_leaves=6,
)


def holds(item: StorageItem, query: dict[str, Any]) -> bool:
    for key, value in query.items():
        if key == "$and":
            found = all(holds(item, each) for each in value)
        elif key == "$or":
            found = any(holds(item, each) for each in value)
        else:
            ops = value if isinstance(value, dict) else {"$eq": value}
            found = all(COMPARE[op](getattr(item, key), each) for op, each in ops.items())
        if not found:
            return False
    return True


@both_engines
async def test_queries_find_the_same_items_as_python(build: Open) -> None:
    storage = build()._storage
    for number in range(28):
        status, staleness = STATUSES[number % 7], number % 5
        one = state(number, seq_staleness=staleness, status=status)
        task = TASKS[number % 3]
        await storage.put(StorageItem([one], 0, 0, task, status, staleness))
    items = await storage.get({})
    assert [(item.item[0].rollout_id, item.status) for item in items] == [
        (number, STATUSES[number % 7]) for number in range(28)
    ]
    first = items[0].uid

    def moved(query: Any) -> Any:
        """Return the query with uids shifted to the stored ones."""
        if isinstance(query, list):
            return [moved(each) for each in query]
        if not isinstance(query, dict):
            return query
        return {
            key: shifted(value) if key in ("uid", "timestamp_id") else moved(value)
            for key, value in query.items()
        }

    def shifted(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shifted(each) for key, each in value.items()}
        return [first + each for each in value] if isinstance(value, list) else first + value

    found: list[dict[str, Any]] = []

    @settings(max_examples=examples(50), database=None, suppress_health_check=list(HealthCheck))
    @given(queries)
    def collect(query: dict[str, Any]) -> None:
        found.append(moved(query))

    collect()
    for query in found:
        expected = [item.uid for item in items if holds(item, query)]
        assert await storage.count(query) == len(expected), query
        found_ids = [one.id for one in storage.buffer.find(**selection(query)._asdict())]
        assert found_ids == expected, query


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"name": "math"}, "one of the fields uid, timestamp_id, task_name, status, staleness"),
        ({"$or": [{"$and": [{"item": []}]}]}, "one of the fields"),
        ({"uid": {"$like": 1}}, r"one of \$eq, \$ne"),
        ({"uid": {"$in": 1}}, r"a list after \$in"),
        ({"uid": {"$between": [3, 1]}}, "two bounds in ascending order"),
        ({"uid": {"$between": [1]}}, "two bounds"),
        ({"$and": {"uid": 1}}, "a list"),
        (["uid"], "a dict"),
        ({"$and": ["uid"]}, "a dict"),
        ({"staleness": {"$gt": None}}, r"a value that \$gt can compare"),
        ({"uid": {"$between": [None, 3]}}, r"a value that \$between can compare"),
        ({"uid": {"$between": [1, "a"]}}, r"a value that \$between can compare"),
        ({"status": ["completed"]}, "numbers or text"),
        ({"status": {"$in": [["completed"]]}}, "numbers or text"),
        ({"uid": "a"}, "values of one kind"),
    ],
)
async def test_invalid_queries_are_refused(
    build: Open, query: Any, expected: str, full: bool
) -> None:
    """They raise a ValueError even if nothing is stored."""
    buffer = build()
    if full:
        await buffer.put([state(1)], "math")
    for call in (buffer._storage.get, buffer._storage.count):
        with pytest.raises(ValueError, match=expected):
            await call(query)
    with pytest.raises(ValueError, match=expected):
        await buffer._policy.get(1, query, buffer._storage)
    assert len(buffer) == full


@pytest.mark.parametrize("consume", ["taken", "never"])
async def test_empty_queries_take_nothing(build: Open, consume: str) -> None:
    buffer = build(consume=consume)
    await buffer.put([state(1)], "math")
    queries_for_nothing: list[dict[str, Any]] = [
        {"status": {"$in": []}},
        {"$and": [{"status": "completed"}, {"status": Status.FAILED}]},
        {"$and": [{"status": "completed"}, {"task_name": {"$in": []}}]},
        {"$and": [{"status": "completed"}, {"task_name": "math"}, {"task_name": "code"}]},
        {"$or": []},
    ]
    for query in queries_for_nothing:
        assert await buffer._policy.get(9, query, buffer._storage) == [], query
    assert len(buffer) == 1


async def test_query_trees_of_xtuner(build: Open) -> None:
    class Node:
        def __init__(self, **fields: Any) -> None:
            vars(self).update(fields)

    storage = build()._storage
    for number in range(4):
        await storage.put(StorageItem([state(number)], 0, 0, "math", Status.COMPLETED, 0))
    first = (await storage.get({}))[0].uid
    tree = Node(
        relation="$and",
        conditions=[
            Node(field="status", op="$eq", value=Status.COMPLETED),
            Node(field="task_name", op="$in", value=["math"]),
            Node(field="uid", op="$between", lower=first + 1, upper=first + 2),
        ],
    )
    assert [item.uid for item in await storage.get(tree)] == [first + 1, first + 2]
