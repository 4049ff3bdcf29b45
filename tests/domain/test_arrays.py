"""Array arguments: stored exactly, or refused with the name of the field."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from replaydb.batch import Batch
from replaydb.domain.episodes import Episode, EpisodeGroup, Turn
from replaydb.domain.episodes.context import GroupContext
from replaydb.errors import InvalidInputError
from replaydb.training import advantages, priorities
from support import payloads
from support.groups import group

MASKED = np.ma.array([1.5, 2.5], mask=[False, True])
COMPLEX = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)


def fake_tensor() -> torch.Tensor:
    """Return a tensor without values, as in `torch.compile`."""
    with FakeTensorMode():
        return torch.zeros(2, dtype=torch.bfloat16)


def nested(layout: torch.layout, dtype: torch.dtype) -> torch.Tensor:
    parts = [torch.ones(1, dtype=dtype), torch.ones(2, dtype=dtype)]
    return torch.nested.nested_tensor(parts, layout=layout)


#: Values that an array without their type would change: by the refusal that they get.
LOSSY: dict[str, list[Any]] = {
    "an array without a mask": [
        MASKED,
        MASKED.astype(">f4"),
        np.ma.array([1, 2]),
        np.ma.masked,
        [MASKED, MASKED],
        ([[1.5, 2.5], MASKED],),
    ],
    "numbers that one dtype holds exactly": [
        [2**53 + 1, 0.5],
        [2**63 + 1, -1],
        [[2**64 - 1], [-1]],
        [np.array([2**53 + 1, 1]), np.array([0.5, 1.0])],
    ],
    "a bool, integer or float array": [
        np.zeros(2, [("a", "<i4")]),
        np.rec.array([(1, 2.0)]),
        *(np.zeros(2, dtype) for dtype in ("g", "D", "G", "M8[s]", "m8[s]", "O", "U3", "S3", "V4")),
        [np.longdouble(1) / 3],
        [2**64],
        [1, None],
        b"bytes",
        torch.zeros(2, dtype=torch.complex128),
    ],
    "a rectangular array of numbers": [
        [[1], [2, 3]],
        [torch.ones(2, dtype=torch.bfloat16)] * 2,
        [torch.ones(2, requires_grad=True)],
        [COMPLEX.conj()],
    ],
}
TENSORS: list[Callable[[], torch.Tensor]] = [
    *(
        lambda name=name: torch.empty(2, dtype=getattr(torch, name))
        for name in ("complex32", "uint4", "bits8", "quint4x2")
    ),
    lambda: torch.eye(2).to_sparse(),
    lambda: torch.eye(2).bfloat16().to_sparse(),
    lambda: torch.eye(2).to_sparse_csr(),
    lambda: torch.eye(2).to_mkldnn(),
    lambda: torch.ones(2, device="meta"),
    lambda: torch.ones(2, device="meta").bfloat16(),
    fake_tensor,
    lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
    lambda: nested(torch.jagged, torch.float32),
    lambda: nested(torch.jagged, torch.bfloat16),
    lambda: nested(torch.strided, torch.bfloat16),
    lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
]

#: Values in an unusual form, and the array that is stored.
EXACT: list[tuple[Any, Any]] = [
    (np.arange(3, dtype=">i4"), np.arange(3, dtype="<i4")),
    (np.array([1 + 2j], ">c8"), np.array([1 + 2j], "<c8")),
    (np.arange(6.0).reshape(2, 3).T, np.arange(6.0).reshape(2, 3).T.copy()),
    (np.arange(6)[::-2], np.array([5, 3, 1])),
    (memoryview(b"ab"), np.array([97, 98], np.uint8)),
    ([2**53 + 1, -1], np.array([2**53 + 1, -1])),
    ([2**64 - 1], np.array([2**64 - 1], np.uint64)),
    ([2.0**60, 2**60, np.inf, np.nan], np.array([2.0**60, 2.0**60, np.inf, np.nan])),
    (COMPLEX.conj(), COMPLEX.numpy().conj()),
    (COMPLEX.conj().imag, -COMPLEX.numpy().imag),
    (torch.ones(2, requires_grad=True), np.ones(2, np.float32)),
    (torch.nn.Parameter(torch.ones(2)), np.ones(2, np.float32)),
    (torch.ones(1).bfloat16().expand(3), torch.ones(3).bfloat16()),
    (torch.eye(3, requires_grad=True).bfloat16().T[1:], torch.eye(3).bfloat16()[1:]),
    (torch.ones(2, 2).to(torch.float8_e8m0fnu)[:, 1], torch.ones(2).to(torch.float8_e8m0fnu)),
]


@pytest.mark.parametrize(("expected", "values"), LOSSY.items())
def test_arrays_that_would_lose_information_are_refused(expected: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidInputError) as caught:
            Episode(token_ids=[1], loss_mask=[1], extras={"x": value})
        assert (caught.value.field, caught.value.expected) == ("extras['x']", expected), value


@pytest.mark.filterwarnings("ignore")  # experimental, or deprecated
@pytest.mark.parametrize("create", TENSORS)
def test_tensors_without_plain_values_are_refused(create: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(InvalidInputError, match=r"^extras\['x'\]: expected a dense tensor of"):
        Episode(token_ids=[1], loss_mask=[1], extras={"x": create()})


@pytest.mark.parametrize(("value", "stored"), EXACT)
def test_arrays_in_an_unusual_form_are_stored_exactly(value: Any, stored: Any) -> None:
    episodes = [Episode(token_ids=[1], loss_mask=[1], extras={"x": value})]
    [decoded] = payloads.decode(payloads.encode(episodes)).episodes
    assert [decoded] == episodes == [Episode(token_ids=[1], loss_mask=[1], extras={"x": stored})]


ROW: dict[str, Any] = {"token_ids": [1, 2], "loss_mask": [1, 1]}
TURN: dict[str, Any] = {"prompt_ids": [1], "response_ids": [1, 2]}
FLAT: dict[str, Any] = {"task_name": "t", "token_ids": [1, 2], "lengths": [1, 1]}
GIVE: dict[str, Callable[[Any], Any]] = {
    "token_ids": lambda it: Episode(token_ids=it, loss_mask=[1, 1]),
    "loss_mask": lambda it: Episode(token_ids=[1, 2], loss_mask=it),
    "logprobs": lambda it: Episode(**ROW, logprobs=it),
    "policy_version": lambda it: Episode(**ROW, policy_version=it),
    "token_extras['x']": lambda it: Episode(**ROW, token_extras={"x": it}),
    "token_rewards": lambda it: Turn(**TURN, token_rewards=it),
    "prompt_ids": lambda it: GroupContext.of(None, it, None),
    "extras['x']": lambda it: GroupContext.of(None, None, {"x": it}),
    "attention_mask": lambda it: EpisodeGroup.from_arrays(
        "t", token_ids=[[1, 2]], attention_mask=[it], loss_mask=[[1, 1]]
    ),
    "lengths": lambda it: EpisodeGroup.from_arrays(**FLAT | {"lengths": it}, loss_mask=[1, 1]),
    "prompt_lengths": lambda it: EpisodeGroup.from_arrays(**FLAT, prompt_lengths=it),
    **{
        name: lambda it, name=name: EpisodeGroup.from_arrays(  # type: ignore[misc]
            **FLAT, prompt_lengths=[0, 0], **{name: it}
        )
        for name in ("rewards", "advantages", "policy_versions", "token_versions")
    },
    "episode_extras['x']": lambda it: EpisodeGroup.from_arrays(
        **FLAT, prompt_lengths=[0, 0], episode_extras={"x": it}
    ),
    "weights": lambda it: Batch([group(), group()], None, it),
    "group_index": lambda it: advantages.grpo(np.ones(2), it),
    "errors": lambda it: priorities.td_errors([it], [[1, 1]], [0], 1),
}


@pytest.mark.parametrize(("field", "give"), GIVE.items(), ids=[*GIVE])
def test_no_argument_ignores_a_mask(field: str, give: Callable[[Any], Any]) -> None:
    """numpy converts masked values to the values below the mask."""
    one = [0, 0] if "index" in field else [1.0, 0.5] if field in FLOATS else [1, 1]
    give(np.array(one))
    with pytest.raises(InvalidInputError) as caught:
        give(np.ma.array(one, mask=[False, True]))
    assert (caught.value.field, caught.value.expected) == (field, "an array without a mask")


FLOATS = {"logprobs", "rewards", "advantages", "weights", "errors"}


@pytest.mark.parametrize("field", ["reward", "advantage", "policy_version", "metadata.x"])
def test_a_masked_number_is_not_0(field: str) -> None:
    name, _, key = field.partition(".")
    masked = MASKED[1]
    with pytest.raises(InvalidInputError, match=f"^{field}: expected .*, got [mM]asked"):
        Episode(**ROW | {name: {key: masked} if key else masked})


@pytest.mark.parametrize("field", ["reward", "advantage", "policy_version"])
def test_a_tensor_without_data_is_no_number(field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}: expected .*, got .*device='meta'"):
        Episode(**ROW | {field: torch.tensor(1.0, device="meta")})


def test_a_masked_number_in_a_list_is_missing() -> None:
    """numpy makes it NaN, with a warning: in logprobs and rewards it means not recorded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        logprobs = Episode(**ROW, logprobs=list(MASKED)).logprobs
    np.testing.assert_array_equal(logprobs, [1.5, np.nan])


VERDICTS = [[True, False], np.array([True, False]), torch.tensor([True, False]), [1, 0]]


@pytest.mark.parametrize("verdicts", [*VERDICTS, np.array([1, 0]), torch.tensor([1, 0])])
def test_rewards_can_be_bools_and_integers(verdicts: Any) -> None:
    for of_one in (Episode(**ROW, reward=verdicts[0]), Turn(**TURN, reward=verdicts[0])):
        assert type(of_one.reward) is float
        assert of_one.reward == 1.0
    acted = Turn(**TURN, token_rewards=verdicts)
    assert acted == Turn(**TURN, token_rewards=[1.0, 0.0])
    made = EpisodeGroup.from_arrays(**FLAT, prompt_lengths=[0, 0], rewards=verdicts)
    assert made.rewards.tolist() == [1.0, 0.0]
    gain = advantages.dr_grpo(verdicts, [0, 0])
    assert gain.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("verdicts", VERDICTS[:-1])
@pytest.mark.parametrize(
    "field",
    [
        "advantages",
        "logprobs",
        "weights",
        "token_ids",
        "policy_version",
        "lengths",
        "prompt_lengths",
        "policy_versions",
        "token_versions",
    ],
)
def test_other_numbers_cannot_be_bools(field: str, verdicts: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}: expected .*bool"):
        GIVE[field](verdicts)


@pytest.mark.parametrize("field", ["advantage", "policy_version"])
def test_other_numbers_of_an_episode_cannot_be_bools(field: str) -> None:
    for verdict in (True, np.True_, torch.tensor(True)):
        with pytest.raises(InvalidInputError, match=f"^{field}: expected .*, got True"):
            Episode(**ROW | {field: verdict})
