"""Tokens of an episode, one by one, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from replaydb.errors import InvalidInputError, NotSupportedError

if TYPE_CHECKING:
    from replaydb import Episode

Decode: TypeAlias = Callable[[list[int]], str]

#: Tokens of which a sign is made, at most; an undecodable byte is not waited for any longer.
LONGEST_SIGN = 8


def decoder(path: Path) -> Decode:
    """What decodes tokens, special ones included, by a tokenizer on this machine.

    Args:
        path: A `tokenizer.json`; or a folder that has one, or whatever else `transformers` reads.

    Raises:
        InvalidInputError: There is no tokenizer.
        NotSupportedError: Nothing is installed that reads it.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.is_file():
            from tokenizers import Tokenizer

            read = Tokenizer.from_file(str(file))
        elif path.is_dir():
            from transformers import AutoTokenizer

            read = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        else:
            raise InvalidInputError("tokenizer", "a file or a folder that is there", path)
    except ImportError as error:
        raise NotSupportedError(
            f"to decode tokens, {error.name} is needed: pip install {error.name}"
        ) from error
    except InvalidInputError:
        raise
    except Exception as error:  # what these raise has no type of its own
        raise InvalidInputError("tokenizer", "a tokenizer of Hugging Face", path) from error
    return lambda ids: str(read.decode(ids, skip_special_tokens=False))


def pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """What each token adds to the text of those before; together they are the text of all.

    Of a sign that is made of several tokens, the last one has it. What a token says may depend on
    the one before: some tokenizers keep the blank between words in this way.
    """
    said: list[str] = []
    start = known = 0  # tokens of the piece before, and after it
    before = ""
    for end in range(1, len(ids) + 1):
        text = decode(list(ids[start:end]))
        if text.endswith("\ufffd") and end < len(ids) and end - known < LONGEST_SIGN:
            said.append("")
            continue
        said.append(text[len(before) :])
        start, known = known, end
        before = decode(list(ids[start:known]))
    return said


def token_columns(one: Episode, decode: Decode | None) -> dict[str, list[Any]]:
    """Columns with a value for each token; None where there is none.

    The advantage is that of the episode, for tokens that are trained on; advantages of tokens are
    among their extras, which are columns too, `extra.NAME`, with a number or nested lists a token.
    """
    ids, mask = one.token_ids.tolist(), one.loss_mask.tolist()
    columns = {"position": list(range(one.num_tokens)), "id": ids}
    if decode is not None:
        columns["text"] = [decode([token]) for token in ids]
    columns["mask"] = [int(trained) for trained in mask]
    columns["logprob"] = _numbers(one.logprobs, one.num_tokens)
    columns["advantage"] = [one.advantage if trained else None for trained in mask]
    columns["version"] = _numbers(one.policy_version, one.num_tokens)
    columns["turn"] = _turns(one)
    for name, values in one.token_extras.items():
        columns[f"extra.{name}"] = values.tolist()
    return columns


def _numbers(values: Any, count: int) -> list[Any]:
    return list(values.tolist()) if hasattr(values, "tolist") else [values] * count


def _turns(one: Episode) -> list[int]:
    if not one.turns:
        return [0] * one.num_tokens
    return [
        i
        for i, turn in enumerate(one.turns)
        for _ in range(len(turn.prompt_ids) + len(turn.response_ids))
    ]
