"""Decode the tokens of an episode one by one, with a local tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from replaydb.errors import InvalidInputError, NotSupportedError

if TYPE_CHECKING:
    from replaydb.domain.episodes.unrepeated import Unrepeated

Decode: TypeAlias = Callable[[list[int]], str]

#: Maximum number of tokens per character. After that, undecodable bytes are taken as they are.
LONGEST_CHARACTER = 8


def decoder(path: Path) -> Decode:
    """Return a function that decodes tokens, special ones included.

    Args:
        path: A `tokenizer.json`, a folder that contains one, or a folder that `transformers` can
            load.

    Raises:
        InvalidInputError: There is no tokenizer at this path, or it cannot be loaded.
        NotSupportedError: The package that loads it is not installed.
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
            raise InvalidInputError("tokenizer", "an existing file or folder", path)
    except ImportError as error:
        raise NotSupportedError(
            f"to decode tokens, {error.name} is needed: pip install {error.name}"
        ) from error
    except InvalidInputError:
        raise
    except Exception as error:  # these packages raise errors of no common type
        raise InvalidInputError("tokenizer", "a Hugging Face tokenizer", path) from error
    return lambda ids: str(read.decode(ids, skip_special_tokens=False))


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text that each token adds; concatenated, they are the text of all tokens.

    If a character consists of several tokens, its text is at the last one. The text of a token can
    depend on the token before: some tokenizers put the space between words in this way.
    """
    texts: list[str] = []
    start = known = 0  # bounds of the tokens of the previous text
    before = ""
    for end in range(1, len(ids) + 1):
        text = decode(list(ids[start:end]))
        if text.endswith("\ufffd") and end < len(ids) and end - known < LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(text[len(before) :])
        start, known = known, end
        before = decode(list(ids[start:known]))
    return texts


def token_columns(tokens: Unrepeated, decode: Decode | None) -> dict[str, list[Any]]:
    """Return columns with one value per token, such as id, text, mask and logprob.

    A missing value is None. The advantage is that of the episode, for tokens that are trained on.
    Token-level advantages are extras, which are columns too: `extra.NAME`, with a number or nested
    lists per token.
    """
    advantage = tokens.episode.advantage
    ids, mask, count = tokens.token_ids().tolist(), tokens.loss_mask().tolist(), tokens.num_tokens
    columns = {"position": list(range(count)), "id": ids}
    if decode is not None:
        columns["text"] = [decode([token]) for token in ids]
    columns["mask"] = [int(trained) for trained in mask]
    columns["logprob"] = _numbers(tokens.logprobs(), count)
    columns["advantage"] = [advantage if trained else None for trained in mask]
    columns["version"] = _numbers(tokens.versions(), count)
    columns["turn"] = [i for i, size in enumerate(tokens.sizes) for _ in range(size)]
    for name, values in tokens.token_extras().items():
        columns[f"extra.{name}"] = [*values.tolist(), *[None] * (count - len(values))]
    return columns


def _numbers(values: Any, count: int) -> list[Any]:
    return list(values.tolist()) if hasattr(values, "tolist") else [values] * count
