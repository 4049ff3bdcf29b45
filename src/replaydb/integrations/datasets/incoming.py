"""Rows of a dataset as groups."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeGuard

import datasets
import numpy as np

from replaydb import Episode, EpisodeGroup, InvalidInputError, blocking
from replaydb.integrations.datasets.outgoing import MESSAGES

#: Groups that are put in one transaction, with where the dataset stands.
PAGE = 64

#: How far above 0 a logprob may be, of probabilities that are rounded.
ROUNDING = 0.01

#: Columns that may have messages of chats.
_MESSAGES = {"prompt", "completion", "completions"}

#: Columns with a value for each completion of a prompt, and what each has of them.
_SEVERAL = {
    "completions": "completion",
    "completion_ids": "completion_ids",
    "rewards": "reward",
    "logprobs": "logprobs",
}


def put_dataset(
    buffer: blocking.Buffer,
    dataset: datasets.Dataset | datasets.IterableDataset,
    name: str,
    *,
    task_name: str | None = None,
    tokenizer: Any = None,
    tags: Sequence[str] = (),
    progress: Callable[[int, int | None], object] | None = None,
) -> int:
    """Put the completions of a dataset, as groups; called again, it goes on where it was.

    A row is one completion (`completion`, `reward`), and goes into a group with those of the same
    prompt that follow it, or has all of its prompt (`completions`, `rewards`: lists). Prompts and
    completions are text, or messages of a chat: `prompt`, and one message of the assistant. Tokens
    come from `prompt_ids` and `completion_ids`, with `logprobs` where they are known; or all from
    the tokenizer, where a row has none of these three. `prompt_uid` names the prompt; rewards may
    be None, or not there. Rows are read as Python values, whatever the format of the dataset.
    Keys of messages that are None are left out, since Arrow adds them to messages that lack keys of
    others; except in columns of type `Json`, where nobody but the user adds them.

    With each page of groups, `buffer.cursor(f"dataset/{name}")` is how many rows are put, and a
    group's uid is `name` and its first row, so an import that was broken off, or runs twice, puts
    each row once.

    Args:
        buffer: A buffer of `replaydb.blocking`.
        dataset: A `Dataset` or an `IterableDataset`, in the same order each time.
        name: What it is called in the buffer.
        task_name: The task of its groups; by default its name.
        tokenizer: Of transformers; its chat template, where prompts are messages.
        tags: Columns that become tags of the group, as its first row has them.
        progress: Called after each page with how many rows are put, and how many there are, which
            is None of an `IterableDataset`.

    Returns:
        How many groups were handed to the buffer now.

    Raises:
        InvalidInputError: A row lacks a column, or cannot be read. Its page is not put, nor what
            follows; the pages before are.
    """
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        raise InvalidInputError("dataset", "a Dataset or an IterableDataset", type(dataset))
    key = f"dataset/{name}"
    start = end = buffer.cursor(name=key) or 0
    if isinstance(dataset, datasets.Dataset) and start >= len(dataset):
        return 0  # which `skip` refuses
    num_rows = len(dataset) if isinstance(dataset, datasets.Dataset) else None
    total, page = 0, []
    for _, members in groupby(enumerate(_rows(dataset, start), start), key=_prompt):
        rows = list(members)
        page.append(_group(name, name if task_name is None else task_name, rows, tokenizer, tags))
        end = rows[-1][0] + 1
        if len(page) == PAGE:
            total += len(buffer.put(page, on_duplicate="ignore", cursor={key: end}))
            page = []
            if progress is not None:
                progress(end, num_rows)
    return total + len(buffer.put(page, on_duplicate="ignore", cursor={key: end}))


def _rows(
    dataset: datasets.Dataset | datasets.IterableDataset, start: int
) -> Iterator[dict[str, Any]]:
    """Yield rows as Python values, whatever format the dataset has, without absent keys."""
    features = dataset.features or {}
    if isinstance(dataset, datasets.IterableDataset):
        dataset = dataset.with_format(None)
    elif dataset.format["type"] != "custom":  # a transform of the user makes the rows
        chosen = {name: dataset.format[name] for name in ("columns", "output_all_columns")}
        dataset = dataset.with_format(None, **chosen)
    for row in dataset.skip(start):
        plain = {name: _plain(value) for name, value in row.items()}
        for name in _MESSAGES & plain.keys():
            plain[name] = _without_absent(plain[name], features.get(name))
        yield plain


def _plain(value: Any) -> Any:
    """Return arrays, tensors and their scalars as lists and numbers, also inside of others."""
    found = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(found, Mapping):
        return {name: _plain(each) for name, each in found.items()}
    if isinstance(found, list) and found and not isinstance(found[0], int | float | str):
        return [_plain(each) for each in found]
    return found  # tokens, which are many, are not looked at one by one


def _without_absent(value: Any, feature: Any) -> Any:
    """Return messages without the keys that Arrow added.

    Objects of one column have the same keys there: those that a message lacks are None. A null in
    a column of JSON is one that somebody wrote.
    """
    if isinstance(feature, datasets.Json):
        return value
    if isinstance(value, Mapping):
        inner = feature if isinstance(feature, Mapping) else {}
        return {
            name: _without_absent(each, inner.get(name))
            for name, each in value.items()
            if each is not None
        }
    if isinstance(value, list):
        return [_without_absent(each, getattr(feature, "feature", None)) for each in value]
    return value


def _prompt(numbered: tuple[int, Mapping[str, Any]]) -> Any:
    """What rows of one group have in common."""
    number, row = numbered
    if _has_several(row):
        return number
    uid = row.get("prompt_uid")
    return (row.get("prompt"), row.get("prompt_ids")) if uid is None else uid


def _has_several(row: Mapping[str, Any]) -> bool:
    ids = row.get("completion_ids")
    nested = _is_list(ids) and bool(ids) and _is_list(ids[0])
    return "completions" in row or "rewards" in row or nested


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _group(
    name: str,
    task_name: str,
    rows: Sequence[tuple[int, Mapping[str, Any]]],
    tokenizer: Any,
    tags: Sequence[str],
) -> EpisodeGroup:
    number, row = rows[0]
    if missing := [tag for tag in tags if tag not in row]:
        raise InvalidInputError(f"tags of row {number}", f"a column {missing[0]!r}", list(row))
    return EpisodeGroup(
        task_name,
        [
            _episode(f"row {number}", one, tokenizer)
            for number, row in rows
            for one in _completions(f"row {number}", row)
        ],
        prompt=row.get("prompt"),
        prompt_ids=row.get("prompt_ids"),
        prompt_uid=row.get("prompt_uid"),
        group_uid=f"{name}/{number}",
        tags={tag: row[tag] for tag in tags},
    )


def _completions(where: str, row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A row for each completion of a row."""
    if not _has_several(row):
        yield row
        return
    lists = {one: row[many] for many, one in _SEVERAL.items() if row.get(many) is not None}
    if not lists.keys() & {"completion", "completion_ids"}:
        raise InvalidInputError(
            where, "completions or completion_ids: lists, as rewards is", list(row)
        )
    counts = {
        one: len(values) if _is_list(values) else repr(values) for one, values in lists.items()
    }
    if len(set(counts.values())) != 1 or not all(map(_is_list, lists.values())):
        raise InvalidInputError(where, "lists of one length for all completions", counts)
    for values in zip(*lists.values(), strict=True):
        yield {**row, **dict(zip(lists, values, strict=True))}


def _episode(where: str, row: Mapping[str, Any], tokenizer: Any) -> Episode:
    prompt, prompt_ids = row.get("prompt"), row.get("prompt_ids")
    completion, ids = row.get("completion"), row.get("completion_ids")
    if (prompt_ids is None or ids is None) and (prompt is None or completion is None):
        raise InvalidInputError(
            where, "columns prompt and completion, or prompt_ids and completion_ids", list(row)
        )
    text, metadata = (None, {}) if completion is None else _text(where, completion)
    if prompt_ids is None or ids is None:
        for of_tokens in ("prompt_ids", "completion_ids", "logprobs"):
            if row.get(of_tokens) is not None:  # which those of the tokenizer need not be
                raise InvalidInputError(
                    where, f"prompt_ids and completion_ids, both, with {of_tokens}", list(row)
                )
        if tokenizer is None:
            raise InvalidInputError(
                "tokenizer", f"one, where {where} has no prompt_ids and completion_ids", None
            )
        try:
            prompt_ids, ids = _tokens(where, prompt, completion, tokenizer)
        except InvalidInputError:
            raise
        except Exception as error:  # of any kind: templates are programs
            expected = "a prompt and a completion that the tokenizer and its chat template accept"
            raise InvalidInputError(where, expected, repr(error)) from error
    episode = Episode(
        prompt_ids=prompt_ids,
        response_ids=ids,
        logprobs=row.get("logprobs"),
        reward=row.get("reward"),
        metadata=metadata,
        text=text,
    )
    if episode.logprobs is not None and np.any(episode.logprobs > ROUNDING):
        raise InvalidInputError(f"logprobs of {where}", "none above 0", episode.logprobs.max())
    return episode


def _text(where: str, completion: Any) -> tuple[str | None, dict[str, str]]:
    """Return the text of a completion, and metadata with its message if that is more than a text.

    A completion is text, or one message of the assistant.
    """
    if isinstance(completion, str):
        return completion, {}
    expected = "text, or one message of the assistant"
    message = completion[0] if _is_list(completion) and len(completion) == 1 else None
    fields = dict(message) if isinstance(message, Mapping) else {}
    role, content = fields.pop("role", None), fields.pop("content", None)
    if role != "assistant" or not (
        isinstance(content, str) or (content is None and any(fields.values()))
    ):
        raise InvalidInputError(f"completion of {where}", expected, completion)
    if not fields:
        return content, {}
    try:
        # Not as ASCII, in which neighbouring unpaired surrogates read as one character.
        return content, {MESSAGES: json.dumps(completion, ensure_ascii=False)}
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"completion of {where}", f"{expected} as JSON", error) from error


def _tokens(
    where: str, prompt: Any, completion: Any, tokenizer: Any
) -> tuple[list[int], list[int]]:
    """Tokens as an engine has them: those of the prompt, and after them those of the completion."""
    if isinstance(prompt, str):
        text, message = _text(where, completion)
        if message:  # which a template would have to write
            expected = "text, or a message with nothing but a text, as the prompt is text"
            raise InvalidInputError(f"completion of {where}", expected, completion)
        ending = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokenizer(prompt)["input_ids"], ids + ending
    if not _is_list(prompt) or not prompt or not all(isinstance(one, Mapping) for one in prompt):
        raise InvalidInputError(f"prompt of {where}", "text, or messages", repr(prompt))
    is_text = isinstance(completion, str)
    answer = {"role": "assistant", "content": completion} if is_text else completion[0]
    begun = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([*prompt, answer], tokenize=False)
    if not whole.startswith(begun):
        raise InvalidInputError(
            f"prompt of {where}", "one that its chat template begins the answer with", repr(begun)
        )
    prompt_ids, ids = (
        tokenizer(part, add_special_tokens=False)["input_ids"]
        for part in (begun, whole.removeprefix(begun))
    )
    return prompt_ids, ids
