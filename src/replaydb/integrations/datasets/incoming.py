"""Import of dataset rows as groups (`put_dataset`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeGuard

import datasets
import numpy as np

from replaydb import Episode, EpisodeGroup, InvalidInputError, blocking
from replaydb.integrations.datasets.outgoing import MESSAGES

#: Groups per put; each put commits them with the position in the dataset.
PAGE = 64

#: How far above 0 a logprob may be because probabilities are rounded.
ROUNDING = 0.01

#: Columns that can contain chat messages.
_MESSAGES = {"prompt", "completion", "completions"}

#: Columns with one value per completion of a prompt, and the column for a single completion.
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
    """Put the completions of a dataset into a buffer, as groups. Call it again to resume.

    A row is either one completion (`completion`, `reward`) or all completions of a prompt
    (`completions`, `rewards`: lists). Consecutive rows of one completion with the same prompt form
    a group. `prompt` and completions are text, or chat messages, in which case a completion is one
    assistant message.

    Tokens are taken from `prompt_ids` and `completion_ids`, with `logprobs` if they are known. If a
    row has none of these three columns, the tokenizer provides the tokens. `prompt_uid` identifies
    the prompt. Rewards may be None or missing.

    Rows are read as Python values, whatever the format of the dataset. Keys of messages that are
    None are removed, because Arrow adds them to messages that lack keys of other messages. Columns
    of type `Json` keep them, because Arrow adds no keys there.

    Each page of groups is committed with the cursor `dataset/{name}`, the number of rows put so
    far. The uid of a group is `{name}/{number of its first row}`. An import that was interrupted,
    or runs twice at the same time, therefore puts each row once.

    Args:
        buffer: A buffer of `replaydb.blocking`.
        dataset: A `Dataset` or an `IterableDataset`, in the same order each time.
        name: Name of the dataset in the buffer.
        task_name: Task of its groups; by default `name`.
        tokenizer: A tokenizer of transformers. Its chat template is used if prompts are messages.
        tags: Columns that become tags of a group, with the values of its first row.
        progress: Called after each page with the number of rows put so far and the total number of
            rows, which is None for an `IterableDataset`.

    Returns:
        The number of groups that this call passed to the buffer, including groups that a concurrent
        import has already stored.

    Raises:
        InvalidInputError: A row lacks a column, or cannot be read or stored; a note of the error
            names the rows of its group. Pages before it are stored; its page and later ones are
            not.
    """
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        raise InvalidInputError("dataset", "a Dataset or an IterableDataset", type(dataset))
    key = f"dataset/{name}"
    start = end = buffer.cursor(name=key) or 0
    if isinstance(dataset, datasets.Dataset) and start >= len(dataset):
        return 0  # `skip` raises an error for such a start
    num_rows = len(dataset) if isinstance(dataset, datasets.Dataset) else None
    total, page = 0, []
    for _, members in groupby(enumerate(_rows(dataset, start), start), key=_prompt):
        rows = list(members)
        try:
            group = _group(name, name if task_name is None else task_name, rows, tokenizer, tags)
        except InvalidInputError as error:
            error.add_note(f"in rows {rows[0][0]} to {rows[-1][0]} of the dataset {name!r}")
            raise
        page.append(group)
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
    """Yield rows as Python values in any dataset format, without the keys that Arrow added."""
    features = dataset.features or {}
    if isinstance(dataset, datasets.IterableDataset):
        dataset = dataset.with_format(None)
    elif dataset.format["type"] != "custom":  # a user transform produces the rows
        chosen = {name: dataset.format[name] for name in ("columns", "output_all_columns")}
        dataset = dataset.with_format(None, **chosen)
    for row in dataset.skip(start):
        plain = {name: _plain(value) for name, value in row.items()}
        for name in _MESSAGES & plain.keys():
            plain[name] = _without_absent(plain[name], features.get(name))
        yield plain


def _plain(value: Any) -> Any:
    """Convert arrays, tensors and their scalars to lists and numbers, also in nested values."""
    found = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(found, Mapping):
        return {name: _plain(each) for name, each in found.items()}
    if isinstance(found, list) and found and not isinstance(found[0], int | float | str):
        return [_plain(each) for each in found]
    return found  # long lists of tokens are not converted one by one


def _without_absent(value: Any, feature: Any) -> Any:
    """Return messages without the keys that Arrow added.

    In Arrow all objects of a column have the same keys; keys that a message lacks are None. A null
    in a `Json` column was written by the user.
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
    """Return the key that the rows of one group share."""
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
    """Yield a row for each completion of a row."""
    if not _has_several(row):
        yield row
        return
    lists = {one: row[many] for many, one in _SEVERAL.items() if row.get(many) is not None}
    if not lists.keys() & {"completion", "completion_ids"}:
        raise InvalidInputError(
            where, "completions or completion_ids as lists, like rewards", list(row)
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
            if row.get(of_tokens) is not None:  # the tokenizer's tokens may differ
                raise InvalidInputError(
                    where, f"prompt_ids and completion_ids, both, with {of_tokens}", list(row)
                )
        if tokenizer is None:
            expected = f"a tokenizer, because {where} lacks prompt_ids or completion_ids"
            raise InvalidInputError("tokenizer", expected, None)
        try:
            prompt_ids, ids = _tokens(where, prompt, completion, tokenizer)
        except InvalidInputError:
            raise
        except Exception as error:  # a template is a program and can raise anything
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
        highest = episode.logprobs.max()
        raise InvalidInputError(f"logprobs of {where}", "values of at most 0", highest)
    return episode


def _text(where: str, completion: Any) -> tuple[str | None, dict[str, str]]:
    """Return the text of a completion, and metadata with its message if it is more than text.

    A completion is text, or one assistant message.
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
        # Not ASCII: two escaped unpaired surrogates in a row would be read as one character.
        return content, {MESSAGES: json.dumps(completion, ensure_ascii=False)}
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"completion of {where}", f"{expected} as JSON", error) from error


def _tokens(
    where: str, prompt: Any, completion: Any, tokenizer: Any
) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt, and of the completion that follows it."""
    if isinstance(prompt, str):
        text, message = _text(where, completion)
        if message:  # only a chat template could render it
            expected = "text, or a message with text only, because the prompt is text"
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
            f"prompt of {where}", "a chat template whose output starts with the prompt", repr(begun)
        )
    prompt_ids, ids = (
        tokenizer(part, add_special_tokens=False)["input_ids"]
        for part in (begun, whole.removeprefix(begun))
    )
    return prompt_ids, ids
