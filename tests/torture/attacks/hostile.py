"""A hostile value in any argument of any public call is a typed error, or harmless.

Every parameter of every call is given every nasty value, one at a time. What is raised must be an
error of replaydb; afterwards the tables must agree with each other.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

import replaydb as rdb
from replaydb import Buffer, Store
from support.groups import episode, group
from torture import judge
from torture.arena import Arena

PROMISES = (7, 9)
ENGINES = ("sqlite", "postgresql")

NASTY: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, -(2**63) - 1, 10**400, 1.5, math.nan, math.inf, -math.inf,
    1e308, 5e-324, "", " ", "\0", "a\0b", "\ud800", "x" * 300, "'; DROP TABLE task; --", b"bytes",
    [], {}, (), set(), [None], [2**64], ["\ud800"], {"a": math.nan}, {"\0": 1}, {"a": object()},
    {1: 2}, object(), np.int64(3), np.float32(0.5), np.array([1, 2]), range(3),
    "failed", ["completed", "nonsense"], rdb.Fifo(), rdb.col.id == 1, 1j, [[1]],
]  # fmt: skip

_NUMBERS = count()
#: Calls that work, by keyword; each argument in turn is replaced.
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "put": lambda: {"groups": group(), "on_duplicate": "error", "priority": 1.0,
                    "cursor": {"a": 1}, "timeout": 0},
    "open_group": lambda: {"task_name": "pieces", "group_uid": f"p{next(_NUMBERS)}",
                           "expected_episodes": 2, "prompt_uid": "p", "deadline": 60.0,
                           "min_episodes": 1, "priority": 1.0, "tags": {"a": 1}, "prompt": "1 + 1",
                           "prompt_ids": [1], "extras": {"a": [1]}, "timeout": 0},
    "add_episode": lambda: {"group_uid": "open", "episode": episode(), "position": 1,
                            "timeout": 0},
    "sample": lambda: {"n": 1, "policy": rdb.Uniform(), "tasks": "gsm8k", "where": None,
                       "max_staleness": None, "runs": None, "step": 1, "timeout": 0,
                       "at_least": 1},
    "lease": lambda: {"n": 1, "policy": rdb.Fifo(), "ttl": 0.001, "owner": "me", "tasks": None,
                      "where": None, "max_staleness": None, "runs": None,
                      "statuses": "completed", "step": 1, "timeout": 0, "at_least": 1},
    "get": lambda: {"ids": [1]},
    "find": lambda: {"uids": "open", "tasks": None, "statuses": None, "where": None, "runs": None,
                     "order_by": rdb.col.id, "limit": 1, "after": None},
    "update": lambda: {"ids": [1], "priority": 1.0, "tags": {"a": 1}, "status": "completed",
                       "reason": "none"},
    "wait_until": lambda: {"at_least": 1, "tasks": None, "statuses": None, "where": None,
                           "runs": None, "timeout": 0},
    "count": lambda: {"tasks": None, "statuses": None, "where": None},
    "delete": lambda: {"ids": None, "uids": "nobody", "tasks": None, "statuses": None,
                       "where": None},
    "update_priorities": lambda: {"ids": [1], "priorities": [1.0]},
    "advance_policy": lambda: {"version": 1},
    "draws": lambda: {"step": 1, "runs": None, "group_id": 1, "before": None, "limit": 10},
    "redraw": lambda: {"draw_id": 1},
    "update_settings": lambda: {"seed": 1},
}  # fmt: skip
_SECONDS = 20.0


async def attack(arena: Arena) -> None:
    """As many arguments as the time allows, in a random order."""
    raw: dict[str, str] = {}
    async with Store.open(arena.url, run="torture") as store:
        buffer = await store.buffer("torture")
        cases = [(name, argument, value) for name, make in CALLS.items() for argument in make()
                 for value in NASTY]  # fmt: skip
        loop = asyncio.get_running_loop()
        end = loop.time() + arena.seconds
        await buffer.put([group() for _ in range(5)])
        await buffer.open_group("pieces", "open", 3)
        for name, argument, value in arena.chance.sample(cases, len(cases)):
            if loop.time() > end:
                break
            if (problem := await _try(buffer, name, argument, value)) is not None:
                raw[f"{name}({argument}={value!r:.60})"] = problem
            arena.figures["hostile values"] += 1
        await _still_works(store)
    judge.check(await judge.read(arena.url))
    shown = "\n".join(f"{call}: {problem}" for call, problem in raw.items())
    assert not raw, f"{len(raw)} raw errors:\n{shown}"


async def _try(buffer: Buffer, name: str, argument: str, value: Any) -> str | None:
    """What was wrong with the answer."""
    arguments = CALLS[name]() | {argument: value}
    if argument == "timeout" and (value is None or (isinstance(value, int | float) and value > 2)):
        return None  # it means: wait
    try:
        async with asyncio.timeout(_SECONDS):
            positional = [arguments.pop("n")] if "n" in arguments else []
            made = getattr(buffer, name)(*positional, **arguments)
            if inspect.isawaitable(made) or hasattr(made, "__await__"):
                await made
    except rdb.ReplayDBError:
        return None
    except TimeoutError:
        return f"no answer in {_SECONDS} s"
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.100}"
    return None


async def _still_works(store: Store) -> None:
    buffer = await store.buffer("afterwards")
    await buffer.put(group("well"))
    assert len(await buffer.sample(1)) == 1
