"""Turn: one step of a trajectory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from replaydb.domain import checks
from replaydb.domain.episodes.arrays import (
    Array,
    ArrayLike,
    Versions,
    fixed,
    same,
    spread,
    spread_named,
    to_bool,
    to_float32,
    to_int32,
    to_logprobs,
    to_numpy,
    to_versions,
)
from replaydb.domain.episodes.ragged import own_extras
from replaydb.domain.episodes.segments import (
    EXTRA,
    LOGPROBS,
    LOSS_MASK,
    TOKEN_IDS,
    TOKEN_VERSIONS,
    TURN_REWARDS,
    Column,
    Segment,
    column_of,
    common_tokens,
    lineage,
    owner,
    response_column,
)
from replaydb.errors import InvalidInputError

_T = TypeVar("_T")


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Turn:
    """One observation -> action step of an episode. Its arrays are read-only copies.

    A turn whose context begins with the tokens of an earlier turn of its episode is best created
    with `parent`. It then has only its other tokens, and arrays of its context are made at each
    access.

    Attributes:
        parent: The earlier turn of the episode that this turn follows, or None.
        prompt_ids: Context tokens, int32 [P].
        response_ids: Action tokens, int32 [R].
        loss_mask: Which action tokens to train on, bool [R]. Default: all.
        logprobs: Behaviour logprobs of the action tokens, float32 [R], or None if not recorded.
            None is not the same as empty. NaN and -inf as in `Episode`.
        reward: Reward of this step, finite, or None. Bools as in `Episode`. Default: the sum of
            `token_rewards`. If you pass both, they must agree.
        token_rewards: Reward of each action token, finite float32 [R], or None if only the step has
            a reward. Integers and bools are converted.
        policy_version: Policy version that acted, or int32 [R] with one per action token; None if
            unknown.
        finish_reason: Why the action ended, as reported by the inference engine.
        token_extras: Arrays [P + R, ...] by name. Pass [P + R, ...] or [R, ...]; with [R, ...] the
            prompt has zeros. Arrays without a value for the last token, [P + R - 1, ...], are kept
            so, unless P is 1: they are then those of the response. `Ragged` as in `Episode`.
        metadata: JSON object.
        uid: Its name, unique in the group, at most 255 characters; or None.
        agent: Name of the model or sub-agent that acted, at most 255 characters; or None.
        state: A reference to a state of the environment, such as a snapshot, as text; or None.
        is_discarded: Whether neither this turn nor the turns that follow it are trained on, as in
            the branch of a retry that lost. They are stored all the same.

    Args:
        new_ids: Context tokens after those of the parent, instead of `prompt_ids`. The context is
            then all tokens of the parent, and these.

    Raises:
        InvalidInputError: An argument has the wrong shape, dtype or value.
    """

    segment: Segment
    parent: Turn | None
    version: int | None
    reward: float | None
    finish_reason: str | None
    metadata: dict[str, Any]
    uid: str | None = None
    agent: str | None = None
    state: str | None = None
    is_discarded: bool = False

    def __init__(
        self,
        *,
        parent: Turn | None = None,
        prompt_ids: ArrayLike | None = None,
        new_ids: ArrayLike | None = None,
        response_ids: ArrayLike,
        loss_mask: ArrayLike | None = None,
        logprobs: ArrayLike | None = None,
        reward: float | None = None,
        token_rewards: ArrayLike | None = None,
        policy_version: ArrayLike | None = None,
        finish_reason: str | None = None,
        token_extras: Mapping[str, ArrayLike] | None = None,
        metadata: Mapping[str, Any] | None = None,
        uid: str | None = None,
        agent: str | None = None,
        state: str | None = None,
        is_discarded: bool = False,
    ) -> None:
        checks.optional(checks.instance, "parent", parent, Turn)
        shared, context, above = _context(parent, prompt_ids, new_ids)
        response = to_int32("response_ids", response_ids)
        prompt_length = shared + len(context)
        size, length = len(response), prompt_length + len(response)
        responses: dict[str, Array | None] = {LOSS_MASK: None, LOGPROBS: None, TURN_REWARDS: None}
        if logprobs is not None:
            responses[LOGPROBS] = spread("logprobs", to_logprobs(logprobs), size)
        total = checks.optional(checks.reward, "reward", reward)
        if token_rewards is not None:
            rewards = spread("token_rewards", to_token_rewards(token_rewards), size)
            total = total_reward(rewards, total)
            responses[TURN_REWARDS] = rewards
        if loss_mask is not None:
            mask = spread("loss_mask", to_bool("loss_mask", loss_mask), size)
            responses[LOSS_MASK] = None if mask.all() else mask
        version = to_versions(policy_version, size)
        if isinstance(version, np.ndarray):
            responses[TOKEN_VERSIONS] = version
        own = fixed(np.concatenate([context, response]))
        columns = {TOKEN_IDS: Column(((shared, own),), length, inherits=above is not None)}
        columns |= {
            name: response_column(values, length)
            for name, values in responses.items()
            if values is not None
        }
        columns |= extra_columns(token_extras, RESERVED, length, prompt_length, size, above)
        set_fields(
            self,
            segment=Segment(length, prompt_length, columns, above),
            parent=parent,
            version=None if isinstance(version, np.ndarray) else version,
            reward=total,
            finish_reason=checks.optional(checks.string, "finish_reason", finish_reason),
            metadata=checks.json_object("metadata", metadata, checks.text),
            uid=checks.optional(checks.name, "uid", uid),
            agent=checks.optional(checks.name, "agent", agent),
            state=checks.optional(checks.string, "state", state),
            is_discarded=checks.flag("is_discarded", is_discarded),
        )

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """Context tokens, int32 [P]."""
        return self.segment.tokens(0, self.segment.prompt_length)

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """Action tokens, int32 [R]."""
        return self.segment.tokens(self.segment.prompt_length, self.segment.length)

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """Which action tokens to train on, bool [R]."""
        return self.segment.mask(self.segment.prompt_length, self.segment.length)

    @property
    def logprobs(self) -> NDArray[np.float32] | None:
        """Behaviour logprobs of the action tokens, float32 [R], or None."""
        logprobs: NDArray[np.float32] | None = self._responses(LOGPROBS)
        return logprobs

    @property
    def token_rewards(self) -> NDArray[np.float32] | None:
        """Reward of each action token, float32 [R], or None."""
        rewards: NDArray[np.float32] | None = self._responses(TURN_REWARDS)
        return rewards

    @property
    def policy_version(self) -> Versions:
        """Policy version that acted, or int32 [R]; None if unknown."""
        own = self._responses(TOKEN_VERSIONS)
        return self.version if own is None else own

    @property
    def token_extras(self) -> dict[str, Any]:
        """Arrays [P + R, ...] by name, or [P + R - 1, ...] if they were passed so."""
        return self.segment.extras()

    @property
    def num_tokens(self) -> int:
        """Number of tokens, P + R."""
        return self.segment.length

    def _responses(self, name: str) -> Any:
        column = self.segment.columns.get(name)
        return None if column is None else column.pieces[0][1]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle some ancestors before the parent, because each level is a recursion."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return _unpickled, (lineage(self), values)

    def __eq__(self, other: object) -> bool:
        """Whether all but the parents is equal, bit for bit."""
        if not isinstance(other, Turn):
            return NotImplemented
        return same_fields(self, other, (*FIELDS, *MARKS))

    def __repr__(self) -> str:
        response = self.num_tokens - self.segment.prompt_length
        return f"Turn({self.num_tokens} tokens, {response} in the response, reward={self.reward})"


def _unpickled(_: tuple[Turn, ...], values: dict[str, Any]) -> Turn:
    return trusted(Turn, **values)


#: Public fields that two equal turns have in common, also `MARKS`.
FIELDS = (
    *("prompt_ids", "response_ids", "loss_mask", "logprobs", "reward", "token_rewards"),
    *("policy_version", "finish_reason", "token_extras", "metadata"),
)
#: Fields of a turn in a trajectory.
MARKS = ("uid", "agent", "state", "is_discarded")
#: Names that no token extra of a turn may have.
RESERVED = frozenset(FIELDS)


def _context(
    parent: Turn | None, prompt_ids: ArrayLike | None, new_ids: ArrayLike | None
) -> tuple[int, NDArray[np.int32], Segment | None]:
    """Return how many tokens are those of a segment, the other tokens of the context, and it."""
    if (prompt_ids is None) == (new_ids is None):
        expected = "prompt_ids, or new_ids with parent"
        actual = "none of them" if prompt_ids is None else "prompt_ids and new_ids"
        raise InvalidInputError("turn", expected, actual)
    if prompt_ids is None:
        if parent is None:
            raise InvalidInputError("parent", "the turn that new_ids continue", None)
        return parent.segment.length, to_int32("new_ids", new_ids), parent.segment
    prompt = to_int32("prompt_ids", prompt_ids)
    known = 0 if parent is None else common_tokens(parent.segment, prompt)
    if parent is None or not known:
        return 0, prompt, None
    return known, prompt[known:], owner(parent.segment, known)


def parents_of(turns: Sequence[Turn]) -> list[int]:
    """Return the index of the parent of each turn of an episode, -1 for none.

    A turn can be there twice. It is then its first place.
    """
    index: dict[int, int] = {}
    for i, turn in enumerate(turns):
        index.setdefault(id(turn), i)
    return [index.get(id(turn.parent), -1) for turn in turns]


def origin_of(turn: Turn) -> Turn | None:
    """Return the turn that has the last of the tokens with which a turn begins, if it is known."""
    above = turn.segment.parent
    one = turn.parent if above is not None else None
    while one is not None and one.segment is not above:
        one = one.parent
    return one


def placed_after(turn: Turn, length: int) -> Turn:
    """Return a turn without a parent after this many tokens of a turn that was not read.

    Its token extras have zeros there.
    """
    segment = turn.segment
    whole = length + segment.length
    columns = {
        name: Column(
            tuple((at + length, values) for at, values in column.pieces),
            column.end + length,
            name == TOKEN_IDS,
        )
        for name, column in segment.columns.items()
    }
    unread = Segment(length, length, {})
    moved = Segment(whole, length + segment.prompt_length, columns, unread)
    return trusted(Turn, **{**vars(turn), "segment": moved})


def with_own_extras(turn: Turn, extras: Mapping[str, ArrayLike]) -> Turn:
    """Return a turn with more token extras, of which only the values of its own tokens are given.

    Args:
        turn: A turn without a parent, or with `new_ids`: N own tokens of the context, and R.
        extras: Arrays [N + R, ...] by name. Before them a turn has the values of its parent, or 0.

    Raises:
        InvalidInputError: A name is invalid, or an array has another length or cannot be stored.
    """
    segment = turn.segment
    parent, begin, end = segment.parent, segment.shared, segment.length
    columns = dict(segment.columns)
    arrays = own_extras(extras, RESERVED | turn.segment.extras(end).keys())
    for name, values in spread_named("token_extras", arrays, end - begin).items():
        theirs = None if parent is None else parent.columns.get(EXTRA + name)
        own = Column(((begin, values),), end)
        inherits = theirs is not None and (theirs.kind, theirs.end) == (own.kind, begin)
        columns[EXTRA + name] = own._replace(inherits=inherits)
    whole = Segment(end, segment.prompt_length, columns, parent)
    return trusted(Turn, **{**vars(turn), "segment": whole})


def check_uids(several: Iterable[tuple[str, Sequence[Turn]]]) -> None:
    """Check that no two turns have the same uid.

    Args:
        several: Name of each sequence of turns, for the error, and the turns.

    Raises:
        InvalidInputError: Two have.
    """
    known: dict[str, str] = {}
    for name, turns in several:
        for i, turn in enumerate(turns):
            if turn.uid is None:
                continue
            where = f"{name}[{i}].uid"
            if (first := known.setdefault(turn.uid, where)) != where:
                expected = f"a uid that no other turn of the group has; {first} is the same"
                raise InvalidInputError(where, expected, turn.uid)


def extra_columns(
    extras: Mapping[str, ArrayLike] | None,
    taken: Collection[str],
    length: int,
    prompt_length: int,
    response: int | None,
    parent: Segment | None = None,
) -> dict[str, Column]:
    """Return the columns of the token extras of a new segment.

    `response`: number of tokens of the response, if arrays may have only their values.

    Raises:
        InvalidInputError: A name is `taken` or invalid, or an array cannot be stored or has another
            number of values.
    """
    found: dict[str, Column] = {}
    for name, array in own_extras(extras, taken).items():
        # The error does not name this length. Rewards are of tokens, so the last one has one, too.
        but_last = None if name == "token_rewards" else length - 1
        if not array.ndim or len(array) not in (length, but_last, response):
            spread(f"token_extras[{name!r}]", array, length, response)  # raises
        column = EXTRA + name
        if len(array) == response:
            found[column] = response_column(array, length)
        else:
            found[column] = column_of(array, length, prompt_length, column, parent)
    return found


def to_token_rewards(value: ArrayLike) -> NDArray[np.float32]:
    """Return finite rewards [N] as a read-only float32 copy, from numbers or bools."""
    given = to_numpy("token_rewards", value)
    # The verdicts of a verifier are bools or integers.
    rewards = to_float32("token_rewards", given if given.dtype.kind == "f" else given * 1.0)
    if not np.isfinite(rewards).all():
        actual = float(rewards[~np.isfinite(rewards)][0])
        raise InvalidInputError("token_rewards", "finite numbers", actual)
    return rewards


def total_reward(rewards: NDArray[np.float32], given: float | None) -> float:
    """Return the sum of token rewards, or the given reward if it equals the sum up to rounding.

    Raises:
        InvalidInputError: It does not.
    """
    total = float(rewards.sum(dtype=np.float64))
    if given is None:
        return checks.reward("token_rewards", total)
    rounding = 1e-5 * float(np.abs(rewards).sum(dtype=np.float64))
    if abs(given - total) > rounding:
        raise InvalidInputError("reward", f"the sum of token_rewards, {total:g}", given)
    return given


def trusted(kind: type[_T], **values: Any) -> _T:
    """Create a frozen dataclass from its fields, without checks."""
    return set_fields(object.__new__(kind), **values)


def set_fields(target: _T, **values: Any) -> _T:
    """Set the fields of a new frozen dataclass."""
    vars(target).update(values)  # other than assignments, these are not refused, and are fast
    return target


def same_fields(one: Any, other: Any, names: Iterable[str] | None = None) -> bool:
    """Whether two instances of one dataclass have the same content, bit for bit.

    `names`: the fields to compare. Default: all.
    """
    compared = [field.name for field in fields(one)] if names is None else names
    return all(same(getattr(one, name), getattr(other, name)) for name in compared)
