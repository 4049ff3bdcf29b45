"""open-instruct: its replay `Table`, kept in a database.

The table of its pull request 1583 is a dict in the memory of one process. This one has the same
constructor and methods, and keeps what is put into it in a buffer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import ColumnElement

import replaydb as rdb
from replaydb import blocking
from replaydb.errors import (
    InvalidInputError,
    InvalidSettingsError,
    StoreClosedError,
    UnknownBufferError,
)
from replaydb.integrations.decoding import decoded_sample
from replaydb.policies import SimplePolicy
from replaydb.settings import Eviction, RateLimit, SettingsChanges

D = TypeVar("D")

SAMPLERS: dict[str, SimplePolicy] = {
    type(policy).__name__.lower(): policy
    for policy in (rdb.Uniform(), rdb.Prioritized(), rdb.Fifo(), rdb.Lifo())
}
REMOVERS: dict[str, Eviction] = {
    "uniform": "uniform",
    "prioritized": "lowest_priority",
    "fifo": "oldest",
    "lifo": "newest",
}

#: Fields of a `GenerationResult`, and of what is around it, that become columns of episodes.
_OF_RESULT = {"responses", "masks", "logprobs", "finish_reasons"}
_OF_DATA = {"queries", "decoded_responses", "reward_scores"}
#: The extra of a group that has all other fields, as JSON.
_REST = "open_instruct"


class Converter(Generic[D]):
    """Groups from what open-instruct puts into its table, and back.

    Everything comes back as it was, but logprobs, which are float32 here, and what JSON has no word
    for: tuples are lists, keys of dicts strings, empty `reward_scores` None. The class that is made
    of what is stored is the one that is named here, whatever the database says.

    Attributes:
        kind: The dataclass of one prompt's completions: `GenerationResult`, or one that has it as
            its field `result`, as `ProcessedResult` does.
    """

    def __init__(self, kind: type[D]) -> None:
        self.kind = kind
        self._adapter = TypeAdapter(kind)

    def to_group(
        self, data: D, task_name: str, *, group_uid: str | None = None, priority: float = 1.0
    ) -> rdb.EpisodeGroup:
        """The completions of one prompt as a group: an episode for each.

        Their prompt is that of `queries`, where there are any, and their policy version the
        `model_step` of the result.

        Raises:
            InvalidInputError: It is no `kind`, has fewer or more of something than responses, or
                something in it cannot be kept, or is not what the fields of `kind` say.
        """
        if not isinstance(data, self.kind):
            raise InvalidInputError("data", f"a {self.kind.__name__}", type(data).__name__)
        result: Any = getattr(data, "result", data)
        episodes, datasets = _episodes(data, result), getattr(data, "datasets", None)
        columns: dict[str, Any] = dict.fromkeys(_OF_DATA | _OF_RESULT, True)
        rest = self._adapter.dump_python(
            data, exclude=columns | {"result": _OF_RESULT}, warnings=False
        )
        group = rdb.EpisodeGroup(
            task_name,
            episodes,
            group_uid=group_uid,
            prompt_uid=result.prompt_id,
            priority=priority,
            tags={"dataset": datasets[0]} if datasets else None,
            extras={_REST: np.frombuffer(json.dumps(rest, default=_json).encode(), np.uint8)},
        )
        try:
            self.from_group(group)  # else the draw that takes it would lose its whole batch
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            raise InvalidInputError(
                ".".join(map(str, wrong["loc"])),
                f"as {self.kind.__name__} has it ({wrong['msg']})",
                repr(wrong["input"]),
            ) from None
        return group

    def from_group(self, group: rdb.EpisodeGroup) -> D:
        """What `to_group` was given."""
        data: dict[str, Any] = json.loads(bytes(np.asarray(group.extras[_REST])))
        episodes = group.episodes
        data["reward_scores"] = _any(one.reward for one in episodes)
        if "result" in data:
            data["queries"] = [one.prompt_ids.tolist() for one in episodes]
            data["decoded_responses"] = group.texts
        data.get("result", data).update(
            responses=[one.response_ids.tolist() for one in episodes],
            masks=[one.loss_mask[one.prompt_length :].astype(int).tolist() for one in episodes],
            logprobs=_any(
                None if one.logprobs is None else one.logprobs[one.prompt_length :].tolist()
                for one in episodes
            ),
            finish_reasons=[one.finish_reason for one in episodes],
        )
        found: D = self._adapter.validate_python(data)
        return found


class Table(Generic[D]):
    """open-instruct's `Table`, which outlives its process and which several processes share.

    It may be used by any number of threads. `buffer` has what the original does not offer: metrics,
    priorities, the draws of every step, and `advance_policy`, from which on what is older than
    `max_age` is not drawn any more.

    Attributes:
        buffer: Where the data is; it is closed by `shutdown`.
        converter: How data becomes groups.
    """

    def __init__(
        self,
        max_size: int,
        sampler: Any,
        remover: Any,
        max_times_sampled: int = 1,
        rate_limiter: Any = None,
        *,
        url: str,
        kind: type[D],
        name: str = "table",
        run: str | None = None,
        max_age: int | None = None,
    ) -> None:
        """Open the table, with what an earlier process has left in it.

        Args:
            max_size: Items at most.
            sampler: "uniform", "prioritized", "fifo" or "lifo", or an object of a class of that
                name, such as open-instruct's selectors are.
            remover: What makes room, in the same words. "prioritized" removes the lowest priority.
            max_times_sampled: Samples after which an item is used up.
            rate_limiter: A rate limit of replaydb, or what has a `min_size`, as open-instruct's
                have; `MinSize(1)` by default.
            url: The database, as for `replaydb.Store.open`.
            kind: See `Converter`.
            name: Name of the buffer, and of the task of all its groups.
            run: Name of the run, as for `replaydb.Store.open`.
            max_age: Training steps by which the model that made an item may be behind.

        Raises:
            InvalidInputError: There is no such selector or limiter.
            InvalidSettingsError: A number is impossible, or `min_size` is more than `max_size`; or
                the table is there already, with other settings, which stay as they are.
        """
        self.converter = Converter(kind)
        self._policy = _named("sampler", sampler, SAMPLERS)
        settings: SettingsChanges = {
            "capacity": rdb.Capacity(groups=max_size),
            "eviction": _named("remover", remover, REMOVERS),
            "max_times_sampled": max_times_sampled,
            "rate_limit": _limit(rate_limiter or rdb.MinSize(1)),
            "max_staleness": max_age,
        }
        self._store = blocking.Store.open(url, run=run)
        try:
            _same(self._store, name, settings)
            self.buffer = self._store.buffer(name, **settings)
        except BaseException:
            self._store.close()
            raise
        self._is_shutdown = False

    def insert(self, key: str, data: D, priority: float = 1.0) -> None:
        """Put an item; one of the same key, used up or not, gives way to it.

        Raises:
            InvalidInputError: The data or the priority cannot be stored.
            StoreClosedError: The table was shut down; nothing was stored.
        """
        group = self.converter.to_group(data, self.buffer.name, group_uid=key, priority=priority)
        self.buffer.put(group, on_duplicate="renew")

    def sample(
        self, n: int, *, where: ColumnElement[bool] | None = None, step: int | None = None
    ) -> list[D] | None:
        """Wait until the limiter allows it, and take up to `n` items.

        Args:
            n: How many at most.
            where: Only of those that meet this expression over `replaydb.col`.
            step: The training step, for the record.

        Returns:
            At least one, unless `n` is 0; None once the table is shut down.

        Raises:
            InvalidInputError: An argument is wrong.
        """
        try:
            batch = self.buffer.sample(
                n, self._policy, where=where, step=step, at_least=1 if n else 0, timeout=None
            )
        except StoreClosedError:
            return None
        return decoded_sample(self.buffer, batch, self.converter.from_group)

    def shutdown(self) -> None:
        """Close the database: who waits in `sample` gets None. What is stored stays. Idempotent."""
        self._is_shutdown = True
        self._store.close()

    @property
    def is_shutdown(self) -> bool:
        """Whether `shutdown` was called; that another process did so is not seen here."""
        return self._is_shutdown

    def __len__(self) -> int:
        """Items that can be sampled.

        Raises:
            StoreClosedError: The table was shut down.
        """
        return self.buffer.count(statuses="completed")


def _named(field: str, selector: Any, choices: dict[str, D]) -> D:
    name = selector if isinstance(selector, str) else type(selector).__name__
    try:
        return choices[name.lower()]
    except KeyError:
        raise InvalidInputError(field, f"one of {', '.join(choices)}", repr(selector)) from None


def _limit(limiter: Any) -> RateLimit:
    if isinstance(limiter, RateLimit):
        return limiter
    if not hasattr(limiter, "min_size"):
        raise InvalidInputError("rate_limiter", "one with a `min_size`", repr(limiter))
    return rdb.MinSize(limiter.min_size)


def _same(store: blocking.Store, name: str, settings: SettingsChanges) -> None:
    """Refuse to change the settings of a table that others may be using."""
    try:
        there = store.buffer(name, create=False).settings
    except UnknownBufferError:
        return
    for field, value in settings.items():
        if (found := getattr(there, field)) != value:
            raise InvalidSettingsError(
                f"{field}: the table {name!r} has {found}, got {value}; "
                "`Buffer.update_settings` changes it for all who use it"
            )


def _episodes(data: Any, result: Any) -> list[rdb.Episode]:
    """One for each response, all of which must have as much beside them as the others."""
    size = len(result.responses)
    queries = getattr(data, "queries", [[]] * size)
    texts = getattr(data, "decoded_responses", [None] * size)
    rewards = getattr(data, "reward_scores", None) or [None] * size
    for field, values in {
        "result.masks": result.masks,
        "result.logprobs": result.logprobs,
        "result.finish_reasons": result.finish_reasons,
        "queries": queries,
        "decoded_responses": texts,
        "reward_scores": rewards,
    }.items():
        if values is not None and len(values) != size:
            raise InvalidInputError(field, f"{size}, as there are responses", len(values))
    return [
        rdb.Episode(
            prompt_ids=queries[i],
            response_ids=result.responses[i],
            loss_mask=result.masks[i],
            logprobs=None if result.logprobs is None else result.logprobs[i],
            reward=rewards[i],
            finish_reason=result.finish_reasons[i],
            policy_version=getattr(result, "model_step", None),
            text=texts[i],
        )
        for i in range(size)
    ]


def _any(values: Iterable[Any]) -> list[Any] | None:
    """All of them, or None where each is None."""
    several = list(values)
    return None if several and all(one is None for one in several) else several


def _json(value: Any) -> Any:
    """What numpy has for a number or a list of them."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise InvalidInputError("data", "what JSON can hold", type(value).__name__)
