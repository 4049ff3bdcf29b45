"""The three ways to build an episode, each converted to one row of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from replaydb.domain import checks
from replaydb.domain.episodes.arrays import (
    Array,
    ArrayLike,
    Versions,
    dtype_name,
    filled,
    fixed,
    same,
    spread,
    to_bool,
    to_int32,
    to_logprobs,
    to_versions,
)
from replaydb.domain.episodes.ragged import Values, placed
from replaydb.domain.episodes.segments import (
    EXTRA,
    LOGPROBS,
    LOSS_MASK,
    TOKEN_IDS,
    TOKEN_VERSIONS,
    Column,
    Piece,
    Segment,
    column_of,
    response_column,
)
from replaydb.domain.episodes.turns import Turn, check_uids, extra_columns
from replaydb.errors import InvalidInputError

_A = TypeVar("_A", bound=Array)

#: Name of the token extra with the rewards of merged turns.
TOKEN_REWARDS = "token_rewards"  # noqa: S105 - not a password

#: Names that no extra of an episode may have.
CORE_FIELDS = frozenset(
    {
        *("token_ids", "loss_mask", "logprobs", "prompt_length", "reward", "advantage"),
        *("policy_version", "finish_reason", "token_extras", "extras", "metadata", "text"),
        *("turns", "prompt_ids", "response_ids"),
    }
)


class Row(NamedTuple):
    """Common form of the three ways to build an episode.

    Attributes:
        segment: Its tokens, if it is not built from turns.
        version: Policy version of the episode, int32 [T] only with turns.
        turns: The turns.
        reward: Sum of the rewards of the turns.
        taken: Names of token extras of turns, and of their rewards.
    """

    segment: Segment | None
    version: Versions
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    taken: frozenset[str] = frozenset()


def row_of_tokens(
    token_ids: ArrayLike,
    loss_mask: ArrayLike,
    logprobs: ArrayLike,
    version: ArrayLike,
    extras: Mapping[str, ArrayLike] | None,
) -> Row:
    """Return the row for `token_ids` and `loss_mask`."""
    tokens = to_int32("token_ids", token_ids)
    if loss_mask is None:
        raise InvalidInputError("loss_mask", f"shape [{len(tokens)}]", None)
    mask = spread("loss_mask", to_bool("loss_mask", loss_mask), len(tokens))
    prompt_length = int(mask.argmax()) if mask.any() else len(mask)
    return row_of(tokens, prompt_length, mask, logprobs, version, extras, None)


def row_of_response(
    prompt_ids: ArrayLike,
    response_ids: ArrayLike,
    loss_mask: ArrayLike,
    logprobs: ArrayLike,
    version: ArrayLike,
    extras: Mapping[str, ArrayLike] | None,
) -> Row:
    """Return the row for `prompt_ids` and `response_ids`."""
    prompt = to_int32("prompt_ids", prompt_ids)
    reply = to_int32("response_ids", response_ids)
    tokens = fixed(np.concatenate([prompt, reply]))
    mask = None if loss_mask is None else to_bool("loss_mask", loss_mask)
    return row_of(tokens, len(prompt), mask, logprobs, version, extras, len(reply))


def row_of(
    tokens: NDArray[np.int32],
    prompt_length: int,
    mask: NDArray[np.bool_] | None,
    logprobs: ArrayLike | None,
    version: ArrayLike | None,
    extras: Mapping[str, ArrayLike] | None,
    response: int | None,
) -> Row:
    """Return the row of tokens and their values.

    Args:
        tokens: Ids of all tokens.
        prompt_length: Number of tokens of the prompt.
        mask: Which tokens are in the loss. Default: the response.
        logprobs: Logprobs.
        version: A policy version, or one for each token.
        extras: Token extras.
        response: Number of tokens of the response, if arrays may have only their values.
    """
    length = len(tokens)
    columns = {TOKEN_IDS: Column(((0, tokens),), length)}
    if mask is not None:
        column = mask_column(_checked("loss_mask", mask, length, response), length, prompt_length)
        columns |= {} if column is None else {LOSS_MASK: column}
    if logprobs is not None:
        given = _checked("logprobs", to_logprobs(logprobs), length, response)
        columns[LOGPROBS] = _column(given, length, prompt_length)
    versions = to_versions(version, length, response)
    if isinstance(versions, np.ndarray):
        columns[TOKEN_VERSIONS] = version_column(versions, prompt_length)
        versions = None
    columns |= extra_columns(extras, CORE_FIELDS, length, prompt_length, response)
    return Row(Segment(length, prompt_length, columns), versions)


def mask_column(mask: NDArray[np.bool_], length: int, prompt_length: int) -> Column | None:
    """Return the column of a loss mask, [T] or [R]; None if exactly the response is in the loss."""
    column = _column(mask, length, prompt_length)
    [(at, values)] = column.pieces
    return None if at == prompt_length and np.all(values) else column


def version_column(versions: NDArray[np.int32], prompt_length: int) -> Column:
    """Return the column of the versions of all tokens. Those of the prompt are usually implied."""
    length = len(versions)
    if (
        prompt_length < length
        and (versions[:prompt_length] == versions[prompt_length:].min()).all()
    ):
        return response_column(versions[prompt_length:], length)
    return Column(((0, versions),), length)


def _column(values: Array, length: int, prompt_length: int) -> Column:
    """Return the column of values [T] or [R]."""
    if len(values) != length:
        return response_column(values, length)
    return column_of(values, length, prompt_length)


def _checked(field: str, array: _A, length: int, response: int | None) -> _A:
    """Return an array with a value for each token, or for each of the response."""
    if array.ndim and len(array) == response:
        return array
    return spread(field, array, length, response)


def row_of_turns(
    turns: ArrayLike, loss_mask: ArrayLike, logprobs: ArrayLike, version: ArrayLike
) -> Row:
    """Return the row for turns."""
    steps = checks.instances("turns", turns, Turn)
    if not steps:
        raise InvalidInputError("turns", "at least one", "none")
    of_turns = {"loss_mask": loss_mask, "logprobs": logprobs}
    if any(turn.version is not None or TOKEN_VERSIONS in turn.segment.columns for turn in steps):
        of_turns["policy_version"], version = version, None
    for name, value in of_turns.items():
        if value is not None:
            raise InvalidInputError(name, "None, since the turns have their own", "a value")
    _check_parents(steps)
    check_uids([("turns", steps)])
    rewards = [turn.reward for turn in steps if turn.reward is not None]
    extras = extras_of(steps)
    for name, arrays in extras.items():
        check_kinds(name, arrays)
    return Row(
        segment=None,
        version=to_versions(version, sum(turn.num_tokens for turn in steps)),
        turns=steps,
        reward=sum(rewards) if rewards else None,
        taken=frozenset(extras) | ({TOKEN_REWARDS} if rewards else set()),
    )


def _check_parents(turns: Sequence[Turn]) -> None:
    """Check that the parent of each turn is an earlier turn."""
    earlier: set[int] = set()
    for i, turn in enumerate(turns):
        if turn.parent is not None and id(turn.parent) not in earlier:
            expected = "an earlier turn of the same episode"
            raise InvalidInputError(f"turns[{i}].parent", expected, repr(turn.parent))
        earlier.add(id(turn))


def extra_values(segment: Segment) -> dict[str, Values]:
    """Return some values of each token extra by name, [n, ...]."""
    return {
        name.removeprefix(EXTRA): column.pieces[0][1]
        for name, column in segment.columns.items()
        if name.startswith(EXTRA)
    }


def check_kinds(name: str, arrays: Sequence[Values]) -> None:
    """Check that all values of a token extra have one dtype and shape.

    Raises:
        InvalidInputError: They do not.
    """
    kinds = {(dtype_name(array), *array.shape[1:]) for array in arrays}
    if len(kinds) > 1:
        expected = "one dtype and shape in all turns"
        raise InvalidInputError(f"token_extras[{name!r}]", expected, sorted(map(str, kinds)))


def joint_tokens(turns: Sequence[Turn]) -> NDArray[np.int32]:
    """Return token ids, int32 [T], turn after turn."""
    ids: NDArray[np.int32] = _joint(turns, TOKEN_IDS, np.empty(0, np.int32))
    return ids


def _joint(turns: Sequence[Turn], name: str, like: Values) -> Any:
    """Return a column [T, ...], turn after turn, 0 where it has no values."""
    pieces: list[Piece] = []
    begin = 0
    for turn in turns:
        segment = turn.segment
        own = segment.pieces(name, 0, segment.length)
        if name == LOGPROBS and name not in segment.columns:
            unknown = np.full(segment.length - segment.prompt_length, np.nan, np.float32)
            own = [(segment.prompt_length, unknown)]
        pieces += [(begin + at, values) for at, values in own]
        begin += segment.length
    return placed(pieces, begin, like)


def joint_mask(turns: Sequence[Turn]) -> NDArray[np.bool_]:
    """Return the loss mask, bool [T], False on prompts."""
    mask = filled((sum(turn.num_tokens for turn in turns),), False, np.bool_)
    end = 0
    for turn in turns:
        end += turn.num_tokens
        mask[end - len(turn.loss_mask) : end] = turn.loss_mask
    return fixed(mask)


def joint_logprobs(turns: Sequence[Turn]) -> NDArray[np.float32] | None:
    """Return logprobs, float32 [T]: 0.0 on prompts, NaN where unknown; None if no turn has any."""
    if all(LOGPROBS not in turn.segment.columns for turn in turns):
        return None
    logprobs: NDArray[np.float32] = _joint(turns, LOGPROBS, np.empty(0, np.float32))
    return logprobs


def joint_extras(turns: Sequence[Turn]) -> dict[str, Values]:
    """Return token extras [T, ...] by name, with zeros for turns without them."""
    return {
        name: _joint(turns, EXTRA + name, like) for name, [like, *_] in extras_of(turns).items()
    }


def extras_of(turns: Sequence[Turn]) -> dict[str, list[Values]]:
    """Return some values of each token extra by name, of each turn that has it."""
    found: dict[str, list[Values]] = {}
    for turn in turns:
        for name, values in extra_values(turn.segment).items():
            found.setdefault(name, []).append(values)
    return found


def joint_versions(
    turns: Sequence[Turn], versions: Sequence[Versions], repeated: Sequence[int] | None = None
) -> Versions:
    """Return one version if all turns have the same, else one per token; None if any is unknown.

    Args:
        turns: The turns.
        versions: For each turn one version, one per token of its response, or one per token.
        repeated: Number of tokens at the beginning of each turn to leave out. Default: 0.
    """
    first = versions[0]
    if isinstance(first, int) and all(same(version, first) for version in versions):
        return first
    rows = []
    for i, (turn, version) in enumerate(zip(turns, versions, strict=True)):
        length = turn.num_tokens
        if version is None:
            return None
        if isinstance(version, int):
            version = np.full(length, version, np.int32)
        elif len(version) != length:
            version = to_versions(version, length, length - turn.segment.prompt_length)
        known = 0 if repeated is None else repeated[i]
        rows.append(np.asarray(version, np.int32)[known:])
    return fixed(np.concatenate(rows))


def extreme_version(turns: Sequence[Turn], choose: Callable[[Iterable[int]], int]) -> int | None:
    """Return the lowest or highest version of a token; None if that of any turn is unknown."""
    of_tokens: list[int] = []
    of_none: list[int] = []
    for turn in turns:
        own = turn.policy_version
        if own is None:
            return None
        found = of_tokens if turn.num_tokens else of_none
        found.append(choose(own.tolist()) if isinstance(own, np.ndarray) else own)
    return choose(of_tokens or of_none)
