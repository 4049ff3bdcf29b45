"""Stored groups as training sets of TRL."""

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

#: Groups that are read at once.
PAGE = 64

#: Metadata of an episode whose value is the messages of a chat completion, as JSON text. Trainers
#: write it if the completion is more than a text of the assistant, such as one that calls tools.
MESSAGES = "completion_json"

#: Groups that were fit for training, also those that were trained on already.
STATUSES = ("completed", "leased", "archived")

Row = dict[str, Any]


class Selection(TypedDict, total=False):
    """Which groups a set is made of, and how it is given.

    Attributes:
        tasks: Only groups of these tasks.
        runs: Only groups that these runs put.
        where: Only groups that meet this expression over `replaydb.col`.
        statuses: Of groups; by default those that were fit for training, also if they have been
            trained on (`completed`, `leased`, `archived`), and in `grpo_dataset` the `filtered`.
        tags: Tags that become columns, such as the answer that a reward function compares with;
            None where a group does not have them; of one type in all groups.
        streaming: Give an `IterableDataset`, which reads the buffer anew, page by page, each time
            it is iterated. By default a `Dataset`: what is stored now, written to a file of Arrow.
        cache_dir: Folder of that file; by default that of `datasets`.
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
    """The best completion of each group: columns `prompt`, `completion` and `reward`.

    Prompts are as they were put: text, or messages, and then the completion is a message too.

    Args:
        url: The store's.
        buffer: Name of the buffer.
        min_reward: Only completions with at least this reward.
        tokens: Give the very tokens that were sampled instead: columns `input_ids`,
            `completion_mask` and `reward`; turns are merged, which may make several rows.
        tokenizer: Decodes the tokens of completions, and prompts, that have no text.
        selection: See `Selection`.

    Raises:
        InvalidInputError: There is nothing to train on; a group has no text and there is no
            tokenizer; or prompts are text in one group and messages in another.
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
    """The best and the worst of each group: columns `prompt`, `chosen`, `rejected` and `margin`.

    Args:
        url: The store's.
        buffer: Name of the buffer.
        min_margin: Only groups whose rewards are further apart than this; by default all but those
            whose rewards are equal.
        tokenizer: See `sft_dataset`.
        selection: See `Selection`.

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
    """Prompts by difficulty: columns `prompt`, `prompt_uid` and `solve_rate`.

    The solve rate of a prompt is that of its newest group: the share of its completions with a
    reward that were solved. Groups without a `prompt_uid` are prompts of their own. The uids that
    were seen are kept in memory while it reads.

    Args:
        url: The store's.
        buffer: Name of the buffer.
        solve_rate: The lowest and the highest, both included.
        solved: A completion with at least this reward is.
        tokenizer: See `sft_dataset`.
        selection: See `Selection`.

    Raises:
        InvalidInputError: See `sft_dataset`; or no rate is between the bounds.
    """
    low, high = solve_rate
    if not 0.0 <= low <= high <= 1.0:
        raise InvalidInputError("solve_rate", "0 <= lowest <= highest <= 1", solve_rate)
    rows = partial(_prompts, low=low, high=high, solved=solved, tokenizer=tokenizer)
    where = col.reward_max.is_not(None)
    # Those that teach nothing, all solved or none, are often `filtered`: they tell the rate best.
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
    for row in merge_turns(group.episodes[best])[0]:
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
    if tokenizer is None or group.prompt_ids is None:
        raise InvalidInputError(
            f"prompt of group {group.group_uid!r}",
            "one that it was put with, or tokenizer= to decode its tokens",
            "none",
        )
    text: str = tokenizer.decode(group.prompt_ids.tolist())
    return text


def _completion(group: StoredGroup, i: int, tokenizer: Any) -> str | list[dict[str, Any]]:
    is_chat = isinstance(group.prompt, list)
    if is_chat and MESSAGES in (metadata := group.episodes[i].metadata):
        where = f"metadata[{MESSAGES!r}] of episode {i} of group {group.group_uid!r}"
        return _messages(where, metadata[MESSAGES])
    text = group.texts[i]
    if text is None:
        if tokenizer is None:
            raise InvalidInputError(
                f"text of episode {i} of group {group.group_uid!r}",
                "one that it was put with, or tokenizer= to decode its tokens",
                "none",
            )
        ids = group.episodes[i].response_ids.tolist()
        text = tokenizer.decode(ids, skip_special_tokens=True)
    return [{"role": "assistant", "content": text}] if is_chat else text


def _messages(where: str, stored: Any) -> list[dict[str, Any]]:
    """Return the messages of a completion that were stored as JSON text."""
    try:
        messages = json.loads(stored)
    except (TypeError, ValueError):
        messages = None
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise InvalidInputError(where, "messages as JSON text", repr(stored))
    return messages


@dataclass(kw_only=True)
class _Rows:
    """Rows of groups, read page by page; opens the store itself, so it may go to any process."""

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
            which["where"] &= col.id <= newest[0].id  # what comes in meanwhile is for another time
        seen: set[tuple[str, str | None]] = set()
        page = buffer.find(**which, order_by=order, limit=PAGE)
        while page:
            if self.newest_of_prompt:
                wanted = [one.id for one in page if _is_new((one.task_name, one.prompt_uid), seen)]
            else:
                wanted = [one.id for one in page]
            try:
                yield from buffer.get(wanted)
            except (UnknownGroupError, PayloadGoneError) as error:  # evicted since they were found
                yield from error.batch or ()
            page = buffer.find(**which, order_by=order, limit=PAGE, after=page[-1])


def _check_file_keeps(row: Row, group_uid: str) -> None:
    """Refuse messages that `datasets` would change when it writes a file.

    Its JSON has null in the place of NaN, and integers beyond 64 bits are read back as text.
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
                    "valid UTF-8 and finite numbers of 64 bits; streaming=True needs neither",
                    repr(value),
                )


def _is_new(prompt: tuple[str, str | None], seen: set[tuple[str, str | None]]) -> bool:
    """Whether it was not seen before; prompts without a uid never were."""
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
    where &= col.num_bytes > 0  # archived groups may have no episodes any more
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
        raise InvalidInputError("dataset", "groups to make rows of", "none")
    # What is stored changes under the same arguments, so no earlier file may be taken for it; and
    # `from_generator` of an IterableDataset would make a fingerprint of every part of a filter.
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
                "columns whose first 1,000 rows are of the type of all, and text of valid UTF-8; "
                "streaming=True needs neither"
            )
            raise InvalidInputError("dataset", expected, str(error.__cause__)) from error
        raise
