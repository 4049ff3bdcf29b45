"""Import of XTuner's dumps: states are read, and no code from the dump is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from xtuner.v1.data_proto.rl_data import RolloutFunctionCall, RolloutToolCall, Status
from xtuner.v1.rl.replay_buffer import AsyncReplayBufferConfig, StorageItem

import replaydb as rdb
from integrations.xtuner.conftest import Open
from integrations.xtuner.states import state
from replaydb.integrations.xtuner import load_dump
from replaydb.integrations.xtuner.states import fingerprint


class _Attack:
    """An object whose pickle calls a function."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


async def test_a_dump_is_imported(build: Open, tmp_path: Path) -> None:
    original = AsyncReplayBufferConfig().build()
    call = RolloutToolCall(id="a", function=RolloutFunctionCall(name="f", arguments={"x": 1}))
    states = [
        state(
            number,
            response_model_steps=[number] * 3,
            tool_calls=[call],
            routed_experts=np.arange(4, dtype=dtype),
            mm_info={"image": torch.ones(2, dtype=torch.bfloat16)},
        )
        for number, dtype in enumerate((np.int64, np.float32, np.uint8))
    ]
    for one in states:
        await original.put([one], "math")
    await original.save(tmp_path)

    buffer = build()
    for _ in range(2):  # the second import changes nothing
        buffer._storage.load_state_dict(load_dump(tmp_path))
    assert len(buffer) == 3
    for item, one in zip(await buffer._storage.get({}), states, strict=True):
        [found] = item.item
        assert (item.task_name, item.status) == ("math", Status.COMPLETED)
        np.testing.assert_array_equal(found.routed_experts, one.routed_experts)
        assert found.routed_experts.dtype == one.routed_experts.dtype
        assert torch.equal(found.mm_info["image"], one.mm_info["image"])
        same = {"routed_experts": None, "mm_info": None, "seq_staleness": 0}
        assert found.model_copy(update=same) == one.model_copy(update=same)


def _dump(*texts: str, staleness: int = 0) -> dict[str, Any]:
    states = [state(1, response=text, seq_staleness=staleness) for text in texts]
    return {
        "items": [
            StorageItem([one], uid, uid, "math", Status.COMPLETED, staleness)
            for uid, one in enumerate(states)
        ]
    }


async def test_dumps_of_two_experiments(build: Open) -> None:
    """Equal uids do not collide, and a later dump of an experiment adds its new states."""
    storage = build()._storage
    first = _dump("a", "b")
    for dump in (first, _dump("c", "d"), first, _dump("a", "b", "e", staleness=2)):
        storage.load_state_dict(dump)
    found = [item.item[0].response for item in await storage.get({})]
    assert found == ["a", "b", "c", "d", "e"]


def test_fingerprints_depend_on_arrays() -> None:
    arrays: list[Any] = [
        np.zeros(2, np.float32),
        np.ones(2, np.float32),
        np.zeros((1, 2), np.float32),
        np.zeros(2, np.int32),
        np.array(True),
        torch.zeros(2, dtype=torch.bfloat16),
    ]
    names = [fingerprint([state(1, routed_experts=array)]) for array in arrays]
    assert len(set(names)) == len(arrays)
    assert fingerprint([state(1, routed_experts=arrays[0].copy())]) == names[0]


@pytest.mark.parametrize("position", ["in the file", "in a state"])
def test_code_in_a_dump_is_not_run(tmp_path: Path, position: str) -> None:
    mark = tmp_path / "was here"
    attack: Any = _Attack(mark)
    if position == "in a state":
        attack = state(1, extra_fields={"x": attack})
    file = tmp_path / "dump.pth"
    torch.save({"storage_state": {"items": [attack]}}, file)
    with pytest.raises(rdb.InvalidInputError, match="holds rollout states and nothing else"):
        load_dump(file)
    assert not mark.exists()


def test_other_files_are_refused(build: Open, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_dump(tmp_path / "missing.pth")
    file = tmp_path / "dump.pth"
    file.write_bytes(b"no dump")
    with pytest.raises(rdb.InvalidInputError, match="path: expected a dump"):
        load_dump(file)
    torch.save({"other": 1}, file)
    with pytest.raises(rdb.InvalidInputError, match="path: expected a dump"):
        load_dump(file)
    with pytest.raises(rdb.InvalidInputError, match="state: expected the state of a NaiveStorage"):
        build()._storage.load_state_dict({"df": None})


def test_its_own_state_is_ignored(build: Open) -> None:
    storage = build()._storage
    storage.load_state_dict(storage.state_dict())
    assert len(storage) == 0
