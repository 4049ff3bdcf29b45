"""Test episodes: Hypothesis strategies for every kind, and a fixed set."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from replaydb.domain.episodes import Episode, Ragged, Turn
from replaydb.domain.episodes.arrays import NUMPY_CODES, TORCH_CODES, Array, from_bits
from replaydb.domain.episodes.context import GroupContext

DTYPES = [*NUMPY_CODES.values(), *TORCH_CODES.values()]
NAN_BITS = [0x7FC00000, 0x7FC00001, 0xFFFFFFFF, 0x7FA00001]  # quiet, with payload, signalling


def array_of(dtype: str, shape: tuple[int, ...], seed: int) -> Array:
    """Return random bits of any dtype: NaN payloads of all kinds, infinities, negative zeros."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    size = (
        2 if dtype == "bfloat16" else 1 if dtype.startswith("float8") else np.dtype(dtype).itemsize
    )
    raw = rng.integers(0, 256, (*shape, size), np.uint8)
    if dtype in TORCH_CODES.values():
        return from_bits(raw.view(np.int16 if size == 2 else np.uint8).reshape(shape), dtype)
    return raw.view(dtype).reshape(shape)


def arrays(length: int | None) -> st.SearchStrategy[Array]:
    """Generate arrays of any dtype, with `length` rows unless it is None."""
    trailing = st.lists(st.integers(0, 3), max_size=2).map(tuple)
    shape = trailing if length is None else trailing.map(lambda rest: (length, *rest))
    return st.builds(array_of, st.sampled_from(DTYPES), shape, st.integers(0, 2**32))


@st.composite
def ragged(draw: st.DrawFn, length: int) -> Ragged:
    """Generate up to 3 values of any dtype and shape for each token."""
    counts = draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))
    return Ragged(draw(arrays(sum(counts))), counts)


def logprobs(length: int) -> st.SearchStrategy[NDArray[np.float32]]:
    any_bits = st.integers(0, 2**32 - 1).filter(lambda bits: bits & 0x7FFFFFFF != 0x7F800000)
    bits = st.sampled_from(NAN_BITS) | any_bits  # infinity is not stored
    values = st.lists(bits, min_size=length, max_size=length)
    return values.map(lambda raw: np.array(raw, np.uint32).view(np.float32))


versions = st.integers(-(2**31), 2**31 - 1)
# Sums of several rewards are still within the range of float32.
rewards = st.floats(-(2.0**120), 2.0**120, width=32)
finite = st.none() | rewards
text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5)
#: Text with NUL characters, unpaired surrogates and their stored forms.
generated = st.lists(
    st.characters() | st.sampled_from(["\0", "\ud83d", "\ude00", "␛", "0000", "d83d", "241b"]),
    max_size=5,
).map("".join)


def json_objects(texts: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Generate JSON objects whose strings, except keys, are from `texts`."""
    values = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | texts | finite,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
        max_leaves=4,
    )
    return st.dictionaries(text, values, max_size=2)


tags = json_objects(text)
metadata = json_objects(generated)


def versions_of(length: int) -> st.SearchStrategy[Any]:
    return st.none() | versions | st.lists(versions, min_size=length, max_size=length)


def extras_of(
    length: int | None, names: str, *, is_ragged: bool = False
) -> st.SearchStrategy[dict[str, Any]]:
    values: st.SearchStrategy[Any] = arrays(length)
    if is_ragged and length is not None:
        values |= ragged(length)
    return st.dictionaries(st.sampled_from(names), values, max_size=2)


#: Token extras of turns: one dtype and shape for each name, in all turns of an episode.
TURN_EXTRAS: dict[str, tuple[str, tuple[int, ...]]] = {
    "t": ("bfloat16", ()),
    "u": ("int16", (2,)),
    "v/": ("bool", ()),
}


#: Fields of turns in a trajectory. Uids are those of no other turn.
MARKS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "uid": st.builds(lambda: uuid.uuid4().hex),
        "agent": st.sampled_from(["main", "search"]),
        "state": text,
        "is_discarded": st.booleans(),
    },
)


@st.composite
def turn_of(draw: st.DrawFn) -> Turn:
    prompt = draw(st.lists(versions, max_size=3))
    response = draw(st.lists(st.integers(0, 9), max_size=3))
    size = len(response)
    per_token = draw(st.none() | st.lists(rewards, min_size=size, max_size=size))
    return Turn(
        prompt_ids=prompt,
        response_ids=response,
        loss_mask=draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size)),
        logprobs=draw(st.none() | logprobs(size)),
        reward=draw(finite) if per_token is None else None,
        token_rewards=per_token,
        policy_version=draw(versions_of(size)),
        finish_reason=draw(st.none() | text),
        token_extras={
            name: array_of(dtype, (len(prompt) + size, *trailing), seed=draw(st.integers(0, 9)))
            for name, (dtype, trailing) in TURN_EXTRAS.items()
            if draw(st.booleans())
        },
        metadata=draw(metadata),
    )


@st.composite
def episode(draw: st.DrawFn, is_ragged: bool = False) -> Episode:
    """Return any episode. `is_ragged`: whether arrays of its tokens can be `Ragged`."""
    prompt, response = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    total = prompt + response
    fields: dict[str, Any]
    if draw(st.booleans()):
        turns = draw(st.lists(turn_of(), min_size=1, max_size=3))
        total = sum(one.num_tokens for one in turns)
        fields = {"turns": turns, "reward": draw(st.none() | st.just(1.0))}
    else:
        fields = {
            "token_ids": draw(st.lists(versions, min_size=total, max_size=total)),
            "loss_mask": draw(st.lists(st.booleans(), min_size=total, max_size=total)),
            "logprobs": draw(st.none() | logprobs(total)),
            "reward": draw(finite),
            "policy_version": draw(versions_of(total)),
        }
    return Episode(
        **fields,
        advantage=draw(finite),
        finish_reason=draw(st.none() | text),
        token_extras=draw(extras_of(total, "ab/", is_ragged=is_ragged)),
        extras=draw(extras_of(None, "cd\u2028")),
        metadata=draw(metadata),
    )


_TOKENS = st.lists(st.integers(0, 3), max_size=6)


@st.composite
def trees(draw: st.DrawFn, kind: str) -> tuple[Episode, Episode]:
    """Return an episode of turns by parent, and the same one with whole contexts."""
    by_parent: list[Turn] = []
    whole: list[Turn] = []
    for _ in range(draw(st.integers(1, 6))):
        response = draw(_TOKENS)
        above = draw(st.none() | st.sampled_from(range(len(by_parent)))) if by_parent else None
        new = draw(_TOKENS)
        context = new
        given: dict[str, Any] = {"prompt_ids": new}
        if above is not None:
            known = [*whole[above].prompt_ids.tolist(), *whole[above].response_ids.tolist()]
            if draw(st.booleans()):
                context, given = known + new, {"new_ids": new}
            else:
                context = known[: draw(st.integers(0, len(known)))] + new
                given = {"prompt_ids": context}
            given["parent"] = by_parent[above]
        values: dict[str, Any] = {"response_ids": response}
        if draw(st.booleans()):
            values["loss_mask"] = [draw(st.booleans()) for _ in response]
        if draw(st.booleans()):
            values["logprobs"] = -np.arange(len(response), dtype=np.float32)
        values["policy_version"] = draw(st.sampled_from([None, 3, [5] * len(response)]))
        values["reward"] = draw(st.sampled_from([None, 0.5]))
        length = len(context) + len(response)
        covered = draw(st.sampled_from([None, length, len(response), max(length - 1, 0)]))
        if covered is not None:
            # Mostly the values of the parent, which has the same formula.
            array = torch.arange(covered * 2).reshape(covered, 2) + draw(st.sampled_from([0, 0, 1]))
            values["token_extras"] = {"x": _of_kind(array, kind)}
        values |= draw(MARKS)
        by_parent.append(Turn(**given, **values))
        whole.append(Turn(prompt_ids=context, **values))
    ids = np.concatenate([[*one.prompt_ids, *one.response_ids] for one in whole])
    # Mostly the values of the parent, for the same tokens.
    joint = draw(st.sampled_from([ids * 0, ids, ids + np.arange(len(ids))])).astype(np.int32)
    extra = _of_kind(torch.tensor(joint)[:, None], kind) if kind == "ragged" else joint
    more: dict[str, Any] = {
        "reward": 1.0,
        "token_extras": {"y": extra} if draw(st.booleans()) else {},
    }
    if len(ids) and all(one.policy_version is None for one in whole) and draw(st.booleans()):
        more["policy_version"] = joint
    return Episode(turns=by_parent, **more), Episode(turns=whole, **more)


def _of_kind(array: torch.Tensor, kind: str) -> Any:
    """Return numbers [n, m] in a dtype, or as a `Ragged` with 0 to 2 of them for each token."""
    if kind != "ragged":
        return array.to(getattr(torch, kind))
    counts = array[:, 0] % 3
    return Ragged(array[:, 0].repeat_interleave(counts).short(), counts)


@st.composite
def shifted(draw: st.DrawFn) -> Episode:
    """Return an episode without turns with a token extra of all but the last token."""
    prompt, response = draw(_TOKENS), draw(_TOKENS)
    extras: dict[str, Any] = {"x": np.arange(max(len(prompt + response) - 1, 0), dtype=np.float32)}
    if draw(st.booleans()):
        extras["x"] = Ragged.of([[i] * (i % 3) for i in range(len(extras["x"]))], np.float32)
    if draw(st.booleans()):
        return Episode(prompt_ids=prompt, response_ids=response, token_extras=extras)
    mask = [False] * len(prompt) + [True] * len(response)
    return Episode(token_ids=prompt + response, loss_mask=mask, token_extras=extras)


#: Episodes of turns by parent, of whole turns, and others, with one kind of extras of turns.
forests = st.sampled_from(["float32", "int8", "bfloat16", "ragged"]).flatmap(
    lambda kind: st.lists(
        trees(kind).flatmap(st.sampled_from) | episode(is_ragged=True) | shifted(), max_size=4
    )
)

contexts = st.builds(
    GroupContext.of,
    st.none() | generated | st.lists(metadata, max_size=2),
    st.none() | st.lists(versions, max_size=3),
    extras_of(None, "ae/"),
)


def sample_episodes() -> list[Episode]:
    """Return one episode of each form with every feature of the format. Must not be changed."""
    quiet_nan = np.array([0x7FC00001], np.uint32).view(np.float32)
    first = Episode(
        prompt_ids=[1, 2],
        response_ids=[3, 4, 5],
        logprobs=np.concatenate([quiet_nan, [-0.5, -1.25]]),
        reward=1.0,
        advantage=-0.5,
        policy_version=12,
        finish_reason="stop",
        token_extras={"values": np.array([[1], [2], [3]], np.float16), "only/here": [1, 2, 3]},
        extras={
            "shared": np.arange(4, dtype=np.int16),
            "state": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        },
        metadata={"level": "hard", "nested": [1, 2.5, None, {"é": True}]},
    )
    second = Episode(
        token_ids=[6, 7],
        loss_mask=[False, True],
        policy_version=[3, 4],
        token_extras={"values": np.array([[4], [5]], np.float16)},
        extras={"shared": np.arange(4, dtype=np.int16), "scalar": np.uint8(9)},
    )
    turns = [
        Turn(
            prompt_ids=[8],
            response_ids=[9, 10],
            logprobs=[-1.0, -2.0],
            reward=0.25,
            policy_version=[1, 2],
            finish_reason="tool_call",
            metadata={"tool": "search"},
        ),
        Turn(prompt_ids=[11], response_ids=[], reward=0.5),
    ]
    third = Episode(
        turns=turns,
        token_extras={"values": np.zeros((4, 1), np.float16)},
        extras={"shared": np.arange(4, dtype=np.int16), "empty": np.empty((0, 2), bool)},
    )
    return [first, second, third]


def sample_branches() -> list[Episode]:
    """Return episodes that share tokens and values of extras. Must not be changed.

    They have columns of every form of format 2.
    """
    first = Turn(
        prompt_ids=range(40),
        response_ids=range(3),
        loss_mask=[1, 0, 1],
        logprobs=[-1.0, -2.0, -3.0],
        policy_version=[1, 2, 3],
        token_rewards=[1.0, 0.0, 2.0],
        token_extras={"x": range(42)},
    )
    second = Turn(
        parent=first,
        new_ids=[6],
        response_ids=[7, 8],
        policy_version=7,
        token_extras={"x": [*range(42), 5, 5, 5]},
    )
    third = Turn(parent=first, new_ids=[9], response_ids=[], token_extras={"x": range(44)})
    of_all = {"y": np.zeros((133, 1), np.int8), "z": np.zeros((133, 2), np.int8)}
    row: dict[str, Any] = {"prompt_ids": range(300), "response_ids": [1, 2]}
    return [
        Episode(turns=[first, second, third], token_extras=of_all),
        Episode(turns=[Turn(prompt_ids=range(40), response_ids=[1])], policy_version=[7] * 41),
        Episode(**row, loss_mask=[True] * 302, logprobs=[-0.5] * 302, policy_version=range(302)),
        Episode(**row, loss_mask=[0, 1], token_extras={"token_rewards": [0.0, 1.0]}),
        Episode(**row, token_extras={"x": np.arange(302 * 2).reshape(302, 2)}),
        Episode(**row, token_extras={"r": Ragged([1.5, -2.0, 0.0], [1, 2])}),
    ]


def sample_trajectories() -> list[Episode]:
    """Return episodes whose turns have all fields of a trajectory. Must not be changed."""
    first = Turn(prompt_ids=range(40), response_ids=[7], uid="a/0", agent="main", state="disk/1")
    lost = Turn(parent=first, new_ids=[8], response_ids=[9], uid="a/1", is_discarded=True)
    retry = Turn(parent=first, new_ids=[8], response_ids=[6], uid="a/2", agent="main")
    other = Turn(prompt_ids=range(40), response_ids=[5], agent="search")
    return [Episode(turns=[first, lost, retry]), Episode(turns=[other])]
