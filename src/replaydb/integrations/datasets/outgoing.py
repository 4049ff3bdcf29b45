"""Export of stored groups as training sets in TRL's formats."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypedDict, Unpack

import datasets
import numpy as np
from datasets.exceptions import DatasetGenerationError
from datasets.io.generator import GeneratorDatasetInputStream
from datasets.utils.json import ujson_dumps, ujson_loads
from sqlalchemy import ColumnElement

from replaydb import (
    InvalidInputError,
    PayloadGoneError,
    ReplayDBError,
    StoredGroup,
    UnknownGroupError,
    blocking,
    col,
)
from replaydb.training import merge_turns

#: Groups per page.
PAGE = 64

#: Metadata key of an episode whose value is the messages of a chat completion, as JSON text.
#: Trainers write it if the completion is more than an assistant's text, such as a tool call.
MESSAGES = "completion_json"

#: Statuses of groups that were fit for training, whether they were trained on or not.
STATUSES = ("completed", "leased", "archived")

Row = dict[str, Any]


class Selection(TypedDict, total=False):
    """Options of a training set: which groups it contains, and whether it is a file or a stream.

    Attributes:
        tasks: Only groups of these tasks.
        runs: Only groups that these runs put.
        where: Only groups that match this expression over `replaydb.col`.
        statuses: Only groups of these statuses. By default those of groups that were fit for
            training, whether they were trained on or not (`completed`, `leased`, `archived`), and
            in `grpo_dataset` also `filtered`.
        tags: Tags that become columns, such as the answer that a reward function compares with.
            A column has one type in all groups, and None for groups without the tag.
        streaming: Return an `IterableDataset`, which reads the buffer page by page in each
            iteration. By default a `Dataset` is returned, a snapshot in an Arrow file.
        cache_dir: Folder of that file; by default the cache folder of `datasets`.
    """

    tasks: str | Iterable[str] | None
    runs: str | Iterable[str] | None
    where: ColumnElement[bool] | None
    statuses: str | Iterable[str]
    tags: Sequence[str]
    streaming: bool
    cache_dir: str | None


def sft_dataset(
    url: str,
    buffer: str,
    *,
    min_reward: float | None = None,
    tokens: bool = False,
    tokenizer: Any = None,
    **selection: Unpack[Selection],
) -> datasets.Dataset | datasets.IterableDataset:
    """Return the best completion of each group: columns `prompt`, `completion` and `reward`.

    Prompts are returned as they were put. If they are messages, completions are messages too.

    Args:
        url: URL of the store.
        buffer: Name of the buffer.
        min_reward: Only completions with at least this reward.
        tokens: Return the sampled tokens instead: columns `input_ids`, `completion_mask` and
            `reward`. Turns are merged, which can result in several rows per completion.
        tokenizer: Decodes the tokens of completions and prompts that have no text.
        selection: See `Selection`.

    Returns:
        A `Dataset`, or an `IterableDataset` with `streaming=True`.

    Raises:
        InvalidInputError: No group was selected; a group has no text and there is no tokenizer; or
            prompts are text in one group and messages in another.
    """
    where = col.reward_max.is_not(None) if min_reward is None else col.reward_max >= min_reward
    rows = partial(_token_rows if tokens else _best_rows, tokenizer=tokenizer)
    return _dataset(url, buffer, rows, where, selection)


def dpo_dataset(
    url: str,
    buffer: str,
    *,
    min_margin: float = 0.0,
    tokenizer: Any = None,
    **selection: Unpack[Selection],
) -> datasets.Dataset | datasets.IterableDataset:
    """Return preference pairs: columns `prompt`, `chosen`, `rejected` and `margin`.

    A pair is the best and the worst completion of a group.

    Args:
        url: URL of the store.
        buffer: Name of the buffer.
        min_margin: Only groups whose highest and lowest reward differ by more than this; by
            default all groups whose rewards are not equal.
        tokenizer: See `sft_dataset`.
        selection: See `Selection`.

    Returns:
        A `Dataset`, or an `IterableDataset` with `streaming=True`.

    Raises:
        InvalidInputError: See `sft_dataset`.
    """
    where = col.reward_max - col.reward_min > min_margin
    return _dataset(url, buffer, partial(_pairs, tokenizer=tokenizer), where, selection)


def grpo_dataset(
    url: str,
    buffer: str,
    *,
    solve_rate: tuple[float, float] = (0.0, 1.0),
    solved: float = 1.0,
    tokenizer: Any = None,
    **selection: Unpack[Selection],
) -> datasets.Dataset | datasets.IterableDataset:
    """Return prompts by difficulty: columns `prompt`, `prompt_uid` and `solve_rate`.

    The solve rate of a prompt is the share of solved completions among the completions with a
    reward in its newest group. Each group without a `prompt_uid` is a prompt of its own. The uids
    read so far are kept in memory.

    Args:
        url: URL of the store.
        buffer: Name of the buffer.
        solve_rate: Lowest and highest solve rate, both inclusive.
        solved: Lowest reward of a solved completion.
        tokenizer: See `sft_dataset`.
        selection: See `Selection`.

    Returns:
        A `Dataset`, or an `IterableDataset` with `streaming=True`.

    Raises:
        InvalidInputError: See `sft_dataset`; or `solve_rate` is not 0 <= lowest <= highest <= 1.
    """
    low, high = solve_rate
    if not 0.0 <= low <= high <= 1.0:
        raise InvalidInputError("solve_rate", "0 <= lowest <= highest <= 1", solve_rate)
    rows = partial(_prompts, low=low, high=high, solved=solved, tokenizer=tokenizer)
    where = col.reward_max.is_not(None)
    # Trainers often filter zero-variance groups, whose solve rate is 0 or 1.
    selection.setdefault("statuses", (*STATUSES, "filtered"))
    return _dataset(url, buffer, rows, where, selection, newest_of_prompt=True)


def _best_rows(group: StoredGroup, tokenizer: Any) -> Iterator[Row]:
    best = int(np.nanargmax(group.rewards))
    yield {
        "prompt": _prompt(group, tokenizer),
        "completion": _completion(group, best, tokenizer),
        "reward": float(group.rewards[best]),
    }


def _token_rows(group: StoredGroup, tokenizer: Any) -> Iterator[Row]:
    best = int(np.nanargmax(group.rewards))
    for row in merge_turns(group.episodes[best], interleaved=True)[0]:
        yield {
            "input_ids": row.episode.token_ids.tolist(),
            "completion_mask": row.episode.loss_mask.astype(int).tolist(),
            "reward": float(group.rewards[best]),
        }


def _pairs(group: StoredGroup, tokenizer: Any) -> Iterator[Row]:
    best, worst = int(np.nanargmax(group.rewards)), int(np.nanargmin(group.rewards))
    yield {
        "prompt": _prompt(group, tokenizer),
        "chosen": _completion(group, best, tokenizer),
        "rejected": _completion(group, worst, tokenizer),
        "margin": float(group.rewards[best] - group.rewards[worst]),
    }


def _prompts(
    group: StoredGroup, low: float, high: float, solved: float, tokenizer: Any
) -> Iterator[Row]:
    rewards = group.rewards[~np.isnan(group.rewards)]
    rate = float(np.mean(rewards >= solved))
    if low <= rate <= high:
        prompt = _prompt(group, tokenizer)
        yield {"prompt": prompt, "prompt_uid": group.prompt_uid, "solve_rate": rate}


def _prompt(group: StoredGroup, tokenizer: Any) -> str | list[dict[str, Any]]:
    if group.prompt is not None:
        return group.prompt
    return _decoded(group, "prompt", group.prompt_ids, tokenizer)


def _completion(group: StoredGroup, i: int, tokenizer: Any) -> str | list[dict[str, Any]]:
    is_chat = isinstance(group.prompt, list)
    if is_chat and MESSAGES in (metadata := group.episodes[i].metadata):
        where = f"metadata[{MESSAGES!r}] of episode {i} of group {group.group_uid!r}"
        return _messages(where, metadata[MESSAGES])
    text = group.texts[i]
    if text is None:
        ids = group.episodes[i].response_ids
        text = _decoded(group, f"text of episode {i}", ids, tokenizer, skip_special_tokens=True)
    return [{"role": "assistant", "content": text}] if is_chat else text


def _decoded(group: StoredGroup, what: str, ids: Any, tokenizer: Any, **options: bool) -> str:
    if tokenizer is None or ids is None:
        where = f"{what} of group {group.group_uid!r}"
        expected = "a stored text, or tokenizer= to decode its tokens"
        raise InvalidInputError(where, expected, "none")
    text: str = tokenizer.decode(ids.tolist(), **options)
    return text


def _messages(where: str, stored: Any) -> list[dict[str, Any]]:
    """Parse the messages of a completion from JSON text."""
    try:
        messages = json.loads(stored)
    except (TypeError, ValueError):
        messages = None
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise InvalidInputError(where, "messages as JSON text", repr(stored))
    return messages


@dataclass(kw_only=True)
class _Rows:
    """Rows of groups, read page by page. It opens the store itself, so any process can run it."""

    url: str = field(repr=False)  # it may hold a password
    buffer: str
    rows_of: Callable[[StoredGroup], Iterable[Row]]
    tags: Sequence[str]
    newest_of_prompt: bool
    is_file: bool
    which: dict[str, Any]

    def __call__(self) -> Iterator[Row]:
        kinds: dict[str, type] = {}
        with blocking.Store.open(self.url, migrate=False) as store:
            for group in self._groups(store.buffer(self.buffer, create=False)):
                tags = {tag: group.tags.get(tag) for tag in self.tags}
                for row in self.rows_of(group):
                    if taken := [tag for tag in self.tags if tag in row]:
                        raise InvalidInputError("tags", f"none of the columns {list(row)}", taken)
                    for name, value in {"prompt": row.get("prompt"), **tags}.items():
                        kind = float if type(value) is int else type(value)
                        if value is not None and kinds.setdefault(name, kind) is not kind:
                            raise InvalidInputError(
                                f"{name} of group {group.group_uid!r}",
                                "text, or messages, in all groups of a dataset"
                                if name == "prompt"
                                else f"{kinds[name].__name__}, as in the groups before",
                                type(value).__name__,
                            )
                    if self.is_file:
                        _check_file_keeps(row, group.group_uid)
                    yield {**row, **tags}

    def _groups(self, buffer: blocking.Buffer) -> Iterator[StoredGroup]:
        order = col.id.desc() if self.newest_of_prompt else col.id
        which = dict(self.which)
        if newest := buffer.find(**which, order_by=col.id.desc(), limit=1):
            which["where"] &= col.id <= newest[0].id  # excludes groups put during the iteration
        seen: set[tuple[str, str | None]] = set()
        page = buffer.find(**which, order_by=order, limit=PAGE)
        while page:
            if self.newest_of_prompt:
                wanted = [one.id for one in page if _is_new((one.task_name, one.prompt_uid), seen)]
            else:
                wanted = [one.id for one in page]
            try:
                yield from buffer.get(wanted)
            except (UnknownGroupError, PayloadGoneError) as error:  # deleted or evicted meanwhile
                yield from error.batch or ()
            page = buffer.find(**which, order_by=order, limit=PAGE, after=page[-1])


def _check_file_keeps(row: Row, group_uid: str) -> None:
    """Refuse messages that `datasets` would change when it writes a file.

    It writes NaN as null, and reads integers beyond 64 bits as text.
    """
    for name, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            try:
                kept = ujson_loads(ujson_dumps(value))
            except (OverflowError, ValueError):
                kept = None
            if kept != value:
                raise InvalidInputError(
                    f"{name} of group {group_uid!r}",
                    "valid UTF-8 and finite 64-bit numbers (not needed with streaming=True)",
                    repr(value),
                )


def _is_new(prompt: tuple[str, str | None], seen: set[tuple[str, str | None]]) -> bool:
    """Return whether a prompt is new, and record it in `seen`. Prompts without uid are new."""
    if prompt in seen:
        return False
    if prompt[1] is not None:
        seen.add(prompt)
    return True


def _dataset(
    url: str,
    buffer: str,
    rows_of: Callable[[StoredGroup], Iterable[Row]],
    where: ColumnElement[bool],
    selection: Selection,
    *,
    newest_of_prompt: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    given = selection.get("where")
    streaming = selection.get("streaming", False)
    where &= col.num_bytes > 0  # archived groups can have lost their episodes
    rows = _Rows(
        url=url,
        buffer=buffer,
        rows_of=rows_of,
        tags=tuple(selection.get("tags", ())),
        newest_of_prompt=newest_of_prompt,
        is_file=not streaming,
        which={
            "tasks": selection.get("tasks"),
            "runs": selection.get("runs"),
            "statuses": selection.get("statuses", STATUSES),
            "where": where if given is None else where & given,
        },
    )
    if not list(islice(rows(), 1)):
        raise InvalidInputError("dataset", "at least one selected group", "none")
    # The result changes under equal arguments, so a cached file must not be reused. In addition,
    # `IterableDataset.from_generator` would compute a fingerprint of every part of a filter.
    stream = GeneratorDatasetInputStream(
        rows,
        streaming=streaming,
        cache_dir=selection.get("cache_dir"),
        fingerprint=uuid.uuid4().hex,
    )
    try:
        return stream.read()
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, ReplayDBError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, TypeError | ValueError):
            expected = (
                "columns whose first 1,000 rows have the type of all rows, and valid UTF-8 "
                "(not needed with streaming=True)"
            )
            raise InvalidInputError("dataset", expected, str(error.__cause__)) from error
        raise
