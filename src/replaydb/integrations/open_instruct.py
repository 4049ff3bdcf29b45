"""open-instruct's replay `Table`, stored in a database.

The original table (pull request 1583) is a dict in the memory of one process. This table has the
same constructor and methods, and stores its items in a buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from sqlalchemy import ColumnElement

import replaydb as rdb
from replaydb import blocking
from replaydb.domain.policies import SimplePolicy
from replaydb.domain.settings import Eviction, RateLimit, SettingsChanges
from replaydb.integrations.decoding import decoded_sample
from replaydb.integrations.values import (
    FLOAT32_MAX,
    dataclasses_of,
    from_extras,
    is_same,
    to_extras,
    to_reward,
)

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


@dataclass(frozen=True)
class _Column:
    """Placeholder in the stored data for a field that episode columns hold."""


#: The extra of a group that has its data as JSON, without the fields that columns hold.
_DATA = "open_instruct"
#: Fields of the data, and the arguments of `Episode` that they become.
_ARGUMENTS = {
    "responses": "response_ids",
    "queries": "prompt_ids",
    "masks": "loss_mask",
    "logprobs": "logprobs",
    "reward_scores": "reward",
    "finish_reasons": "finish_reason",
    "decoded_responses": "text",
}
#: Fields that can be empty or missing; `GenerationResult` does not have all of them.
_OPTIONAL = {"queries", "logprobs", "reward_scores", "decoded_responses"}


class Converter(Generic[D]):
    """Conversion of open-instruct's table items to groups, and back.

    Tokens, masks, logprobs, rewards, finish reasons and texts become columns of episodes. A field
    that its column cannot hold exactly (such as logprobs beyond the precision of float32) is also
    stored unchanged. The data is therefore returned with equal values of the same types, whatever
    its annotations say. Instances of subclasses of builtin types are returned as the builtin type.

    Attributes:
        kind: The dataclass of one prompt's completions: `GenerationResult`, or a dataclass that has
            it as its field `result`, as `ProcessedResult` does. You pass it because stored data
            must not decide which class is instantiated.

    Raises:
        InvalidInputError: `kind` is not a dataclass.
    """

    def __init__(self, kind: type[D]) -> None:
        self.kind = kind
        self._classes = {_Column.__qualname__: _Column} | dataclasses_of("kind", kind)

    def to_group(
        self, data: D, task_name: str, *, group_uid: str | None = None, priority: float = 1.0
    ) -> rdb.EpisodeGroup:
        """Convert the completions of one prompt to a group, with one episode for each.

        The prompt tokens are taken from `queries`, if there are any, and the policy version from
        `model_step` of the result. The tag `dataset` is the first of `datasets`; several names are
        joined by ", ".

        Args:
            data: An instance of `kind`.
            task_name: Task of the group.
            group_uid: Uid of the group; by default one is generated.
            priority: Sampling priority of the group.

        Raises:
            InvalidInputError: `data` is not a `kind`, a field does not have one value per response,
                or a value cannot be stored.
        """
        if type(data) is not self.kind:
            raise rdb.InvalidInputError("data", f"a {self.kind.__name__}", type(data).__name__)
        result: Any = getattr(data, "result", data)
        if type(result) not in self._classes.values():
            expected = f"the dataclass that {self.kind.__name__} has"
            raise rdb.InvalidInputError("data.result", expected, type(result).__name__)
        episodes = _episodes(data, result)
        stored = _without(data, _columns(episodes))
        return rdb.EpisodeGroup(
            task_name,
            episodes,
            group_uid=group_uid,
            prompt_uid=result.prompt_id,
            priority=priority,
            tags=_tags(getattr(data, "datasets", None)),
            extras=to_extras("data", stored, _DATA, self._classes),
        )

    def from_group(self, group: rdb.EpisodeGroup) -> D:
        """Convert a group of `to_group` back to its data.

        Raises:
            InvalidInputError: `kind` has a field without default that was not stored.
        """
        data: D = from_extras(group.extras, _DATA, self._classes)
        columns = _columns(group.episodes)
        for part in (data, getattr(data, "result", data)):
            for name, values in columns.items():
                if isinstance(getattr(part, name, None), _Column):
                    object.__setattr__(part, name, copy(values))  # both parts may have it
        return data


class Table(Generic[D]):
    """open-instruct's `Table` in a database: durable, and shared by any number of processes.

    Any number of threads can use it. `buffer` offers more than the original: metrics, priorities,
    the draws of every step, and `advance_policy`, which expires items older than `max_age`.

    Attributes:
        buffer: The buffer that stores the items; `shutdown` closes it.
        converter: Converts items to groups and back.
        is_shutdown: Whether `shutdown` was called on this object; other processes have no effect
            on it.
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
        """Open the table. Items of earlier processes are still in it.

        Args:
            max_size: Maximum number of items.
            sampler: "uniform", "prioritized", "fifo" or "lifo", or an object of a class with that
                name, such as open-instruct's selectors.
            remover: Which item is removed when the table is full, with the same names.
                "prioritized" removes the lowest priority.
            max_times_sampled: Number of samples after which an item is used up.
            rate_limiter: A rate limit of replaydb, or an object with a `min_size`, such as
                open-instruct's limiters; by default `MinSize(1)`.
            url: URL of the database, as for `replaydb.Store.open`.
            kind: See `Converter`.
            name: Name of the buffer, and of the task of all its groups.
            run: Name of the run, as for `replaydb.Store.open`.
            max_age: Maximum number of training steps since the model that generated an item; by
                default unlimited.

        Raises:
            InvalidInputError: A selector or limiter is unknown, or `kind` is not a dataclass.
            InvalidSettingsError: A number is out of range, `min_size` is more than `max_size`, or
                the table already exists with other settings, which are not changed.
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
        self.is_shutdown = False

    def insert(self, key: str, data: D, priority: float = 1.0) -> None:
        """Insert an item. It replaces an item of the same key, even if that one is used up.

        Args:
            key: Key of the item.
            data: An instance of `kind`.
            priority: Sampling priority, at least 0.

        Raises:
            InvalidInputError: The data or the priority cannot be stored.
            StoreClosedError: The table was shut down; nothing was stored.
        """
        group = self.converter.to_group(data, self.buffer.name, group_uid=key, priority=priority)
        self.buffer.put(group, on_duplicate="renew")

    def sample(
        self, n: int, *, where: ColumnElement[bool] | None = None, step: int | None = None
    ) -> list[D] | None:
        """Wait until the limiter permits it, and sample up to `n` items.

        Args:
            n: Maximum number of items.
            where: Only items that match this expression over `replaydb.col`.
            step: The training step, recorded with the draw.

        Returns:
            At least one item, unless `n` is 0; None once the table is shut down. Items that cannot
            be decoded are logged and left out.

        Raises:
            InvalidInputError: An argument is invalid.
            Exception: No item can be decoded.
        """
        try:
            batch = self.buffer.sample(
                n, self._policy, where=where, step=step, at_least=1 if n else 0, timeout=None
            )
        except rdb.StoreClosedError:
            return None
        return decoded_sample(self.buffer, batch, self.converter.from_group)

    def shutdown(self) -> None:
        """Close the table. Waiting `sample` calls return None; items are kept. Idempotent."""
        self.is_shutdown = True
        self._store.close()

    def __len__(self) -> int:
        """Return the number of items that can be sampled.

        Raises:
            StoreClosedError: The table was shut down.
        """
        return self.buffer.count(statuses="completed")


def _named(field: str, selector: Any, choices: dict[str, D]) -> D:
    name = selector if isinstance(selector, str) else type(selector).__name__
    try:
        return choices[name.lower()]
    except KeyError:
        raise rdb.InvalidInputError(field, f"one of {', '.join(choices)}", repr(selector)) from None


def _limit(limiter: Any) -> RateLimit:
    if isinstance(limiter, RateLimit):
        return limiter
    if not hasattr(limiter, "min_size"):
        raise rdb.InvalidInputError("rate_limiter", "an object with a `min_size`", repr(limiter))
    return rdb.MinSize(limiter.min_size)


def _same(store: blocking.Store, name: str, settings: SettingsChanges) -> None:
    """Refuse to change the settings of an existing table, which other processes may use."""
    try:
        there = store.buffer(name, create=False).settings
    except rdb.UnknownBufferError:
        return
    for field, value in settings.items():
        if (found := getattr(there, field)) != value:
            raise rdb.InvalidSettingsError(
                f"{field}: the table {name!r} has {found}, got {value}; "
                "`Buffer.update_settings` changes it for all processes"
            )


def _episodes(data: Any, result: Any) -> list[rdb.Episode]:
    """Return one episode per response. Each field must have one value per response."""
    size, columns = 0, {}
    for name, argument in _ARGUMENTS.items():
        field, values = _values(data, result, name)
        if values is None and name in _OPTIONAL:
            continue
        if not isinstance(values, Sequence | np.ndarray):
            raise rdb.InvalidInputError(field, "a list", type(values).__name__)
        if len(values) == 0 and name in _OPTIONAL:
            continue
        size = size or len(values)
        if len(values) != size:
            raise rdb.InvalidInputError(field, f"{size} values, one for each response", len(values))
        columns[argument] = values
    return [_episode(data, result, {of: columns[of][i] for of in columns}, i) for i in range(size)]


def _episode(data: Any, result: Any, values: dict[str, Any], position: int) -> rdb.Episode:
    # Other values are only in the stored data, as are texts of other types.
    values["reward"] = to_reward(values.get("reward"))
    with suppress(TypeError, ValueError, OverflowError):  # `Episode` says what is wrong
        logprobs = np.asarray(values.get("logprobs"), np.float64)
        if (beyond := abs(logprobs) > FLOAT32_MAX).any():
            values["logprobs"] = np.where(beyond, np.nan, logprobs)
    for argument in ("finish_reason", "text"):
        if not isinstance(values.get(argument), str):
            values[argument] = None
    version = getattr(result, "model_step", None)
    try:
        return rdb.Episode(**{"prompt_ids": []} | values, policy_version=version)
    except rdb.InvalidInputError as error:
        for name, argument in {**_ARGUMENTS, "model_step": "policy_version"}.items():
            if argument == error.field:
                field = f"{_values(data, result, name)[0]}[{position}]"
                raise rdb.InvalidInputError(field, error.expected, error.actual) from None
        raise


def _values(data: Any, result: Any, name: str) -> tuple[str, Any]:
    """Return the path and value of a field of the data, or of its result if it has none."""
    if hasattr(data, name) or result is data:
        return f"data.{name}", getattr(data, name, None)
    return f"data.result.{name}", getattr(result, name, None)


def _columns(episodes: Sequence[rdb.Episode]) -> dict[str, Any]:
    """Return the fields of the data that the columns of the episodes hold."""
    pairs = [(one, one.prompt_length) for one in episodes]
    return {
        "queries": [one.prompt_ids.tolist() for one in episodes],
        "responses": [one.response_ids.tolist() for one in episodes],
        "masks": [one.loss_mask[start:].astype(int).tolist() for one, start in pairs],
        "logprobs": [
            None if one.logprobs is None else one.logprobs[start:].tolist() for one, start in pairs
        ],
        "reward_scores": [one.reward for one in episodes],
        "finish_reasons": [one.finish_reason for one in episodes],
        "decoded_responses": [one.text for one in episodes],
    }


def _without(data: Any, columns: Mapping[str, Any]) -> Any:
    """Return a copy with `_Column` in place of each field that the columns hold exactly."""
    bare = copy(data)
    for name, values in columns.items():
        if is_same(getattr(data, name, None), values):
            object.__setattr__(bare, name, _Column())
    if hasattr(data, "result"):
        object.__setattr__(bare, "result", _without(data.result, columns))
    return bare


def _tags(datasets: Any) -> dict[str, str]:
    """Return the dataset of the first completion as a tag; a row can have several datasets."""
    first = datasets[0] if datasets else None
    names = [first] if isinstance(first, str) else first
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        return {"dataset": ", ".join(names)}
    return {}
