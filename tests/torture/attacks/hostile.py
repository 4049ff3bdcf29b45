"""A hostile value in any argument of any public call raises a typed error or is harmless.

Each parameter of each call gets each hostile value, one at a time. Only errors of replaydb may be
raised, and afterwards the tables must be consistent.
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
from torture import checker
from torture.context import AttackContext

PROMISES = (7, 9)
ENGINES = ("sqlite", "postgresql")

HOSTILE: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, -(2**63) - 1, 10**400, 1.5, math.nan, math.inf, -math.inf,
    1e308, 5e-324, "", " ", "\0", "a\0b", "\ud800", "x" * 300, "'; DROP TABLE task; --", b"bytes",
    [], {}, (), set(), [None], [2**64], ["\ud800"], {"a": math.nan}, {"\0": 1}, {"a": object()},
    {1: 2}, object(), np.int64(3), np.float32(0.5), np.array([1, 2]), range(3),
    "failed", ["completed", "nonsense"], rdb.Fifo(), rdb.col.id == 1, 1j, [[1]],
]  # fmt: skip

_NUMBERS = count()
#: Valid arguments of each call, which are replaced one at a time.
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "put": lambda: {"groups": group(), "on_duplicate": "error", "priority": 1.0,
                    "cursor": {"a": 1}, "timeout": 0},
    "open_group": lambda: {"task_name": "incremental", "group_uid": f"p{next(_NUMBERS)}",
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
    "delete": lambda: {"ids": None, "uids": "unknown", "tasks": None, "statuses": None,
                       "where": None},
    "update_priorities": lambda: {"ids": [1], "priorities": [1.0]},
    "advance_policy": lambda: {"version": 1},
    "draws": lambda: {"step": 1, "runs": None, "group_id": 1, "before": None, "limit": 10},
    "redraw": lambda: {"draw_id": 1},
    "update_settings": lambda: {"seed": 1},
}  # fmt: skip
_SECONDS = 20.0


async def attack(context: AttackContext) -> None:
    """Try hostile values in random order until the end of the round."""
    raw: dict[str, str] = {}
    async with Store.open(context.url, run="torture") as store:
        buffer = await store.buffer("torture")
        cases = [(name, argument, value) for name, make in CALLS.items() for argument in make()
                 for value in HOSTILE]  # fmt: skip
        loop = asyncio.get_running_loop()
        end = loop.time() + context.seconds
        await buffer.put([group() for _ in range(5)])
        await buffer.open_group("incremental", "open", 3)
        for name, argument, value in context.chance.sample(cases, len(cases)):
            if loop.time() > end:
                break
            if (problem := await _try(buffer, name, argument, value)) is not None:
                raw[f"{name}({argument}={value!r:.60})"] = problem
            context.figures["hostile values"] += 1
        await _still_works(store)
    checker.check_tables(await checker.read_tables(context.url))
    shown = "\n".join(f"{call}: {problem}" for call, problem in raw.items())
    assert not raw, f"{len(raw)} raw errors:\n{shown}"


async def _try(buffer: Buffer, name: str, argument: str, value: Any) -> str | None:
    """Make a call; return a description of a violation, or None."""
    arguments = CALLS[name]() | {argument: value}
    if argument == "timeout" and (value is None or (isinstance(value, int | float) and value > 2)):
        return None  # the call would wait
    try:
        async with asyncio.timeout(_SECONDS):
            positional = [arguments.pop("n")] if "n" in arguments else []
            result = getattr(buffer, name)(*positional, **arguments)
            if inspect.isawaitable(result) or hasattr(result, "__await__"):
                await result
    except rdb.ReplayDBError:
        return None
    except TimeoutError:
        return f"no result in {_SECONDS} s"
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.100}"
    return None


async def _still_works(store: Store) -> None:
    buffer = await store.buffer("afterwards")
    await buffer.put(group("well"))
    assert len(await buffer.sample(1)) == 1
