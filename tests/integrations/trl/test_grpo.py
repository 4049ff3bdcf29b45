"""TRL's real GRPO trainer with replay, training a tiny model."""

from __future__ import annotations

import math
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.trl.conftest import Child
from integrations.trl.tiny import (
    PROMPTS,
    Scripted,
    ScriptedFields,
    by_step,
    scripted_rewards,
    train,
    train_rank,
    trainer,
)
from replaydb import InvalidInputError, MinSize, Mix, NotSupportedError, Queue, blocking, col
from replaydb.integrations.datasets import dpo_dataset, sft_dataset
from replaydb.integrations.trl.grpo import TOLERANCE
from support.engines import both_engines, postgresql_nightly

#: Two groups whose rewards differ, with prompts and completions of several lengths.
GOOD = [
    ([2, 3, 4, 5], [6, 7, 2, 1], 1.0),
    ([2, 3, 4, 5], [6, 1], 0.0),
    ([2, 3, 4, 5], [7, 7, 1], 0.5),
    ([2, 3, 4, 5], [1], 0.0),
    ([3, 0, 3], [4, 0, 4, 4, 4], 0.0),  # a prompt and a completion that have the padding token
    ([3, 0, 3], [4, 4, 1], 1.0),
    ([3, 0, 3], [5, 1], 1.0),
    ([3, 0, 3], [6, 1], 1.0),
]
#: A zero-variance group, though the float32 std of its rewards is not 0; and one with variance.
MIXED = [([2], [3, 1], 0.1)] * 4 + [([4], [5, 6, 1], float(i % 2)) for i in range(4)]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


def scripted(folder: Path, buffer: blocking.Buffer, kind: type[Any] = Scripted, **more: Any) -> Any:
    made = trainer(folder, buffer, kind=kind, max_completion_length=8, **more)
    made.reward_funcs = [scripted_rewards(made)]
    return made


def row(outputs: dict[str, Any], i: int) -> dict[str, Any]:
    """Return the fields of a completion in a batch, without padding."""
    prompt, length = outputs["prompt_mask"][i].bool(), int(outputs["completion_mask"][i].sum())
    found = {"prompt_ids": outputs["prompt_ids"][i][prompt].tolist()}
    for name, field in outputs.items():
        if name not in ("prompt_ids", "prompt_mask", "num_items_in_batch"):
            values = field[i].reshape(-1)[:length].tolist()
            found[name] = [round(value, 5) for value in values]
    return found


def rows(outputs: dict[str, Any], begin: int) -> list[dict[str, Any]]:
    return [row(outputs, i) for i in range(begin, begin + 4)]


@both_engines
def test_training_stores_everything_and_replays(buffer: blocking.Buffer, tmp_path: Path) -> None:
    made = trainer(tmp_path, buffer)
    made.train()
    groups = buffer.get([one.id for one in buffer.find(limit=100)])
    assert [one.group_uid for one in groups] == [
        f"tiny/{step}/0/{i}" for step in range(6) for i in range(2)
    ]
    for group in groups:
        step = int(group.group_uid.split("/")[1])
        assert group.status == ("filtered" if step % 2 else "completed")
        for i, episode in enumerate(group.episodes):
            assert episode.policy_version == step
            assert 0 not in episode.prompt_ids
            assert episode.logprobs is not None
            assert (episode.logprobs[episode.prompt_length :] < 0).all()
            assert episode.reward == pytest.approx(0.1 if step % 2 else i % 2)
            assert episode.metadata["rewards"] == {"by_step": episode.reward}
            assert episode.advantage == pytest.approx(0.0 if step % 2 else i % 2 * 2 - 1, abs=0.14)
        assert (group.priority > 0) == (step % 2 == 0)
    draws = sorted(buffer.draws(), key=lambda draw: draw.step or 0)
    assert [draw.step for draw in draws] == list(range(6))
    version = {group.id: group.min_policy_version for group in groups}
    for draw in draws:
        assert draw.step is not None
        assert len(draw.group_ids) == 2
        replayed = [one for one in draw.group_ids if version[one] != draw.step]
        assert len(replayed) == (2 if draw.step % 2 else 0)
    assert buffer.policy_version == 5


def test_replay_changes_the_policy_if_all_fresh_groups_have_zero_variance(
    buffer: blocking.Buffer, tmp_path: Path
) -> None:
    seen = []

    def observed(**kwargs: Any) -> list[float | None]:
        seen.append(made.model.model.embed_tokens.weight.detach().clone())
        return by_step(**kwargs)

    made = trainer(tmp_path, buffer, reward=observed, max_steps=3, logging_steps=1)
    made.train()
    assert not torch.equal(seen[1], seen[2])  # by the second step, whose rewards were equal
    logs = [log["replay/replayed"] for log in made.state.log_history if "reward" in log]
    assert logs == [0.0, 1.0, 0.0]
    assert made.state.log_history[1]["reward"] == pytest.approx(0.1)  # of the generated groups


LOGPS = "old_per_token_logps"


@pytest.mark.parametrize(
    "more", ["nothing", "sampled", "tools", "reference", "token ratios", "sequence ratios"]
)
def test_replayed_groups_are_unchanged(buffer: blocking.Buffer, tmp_path: Path, more: str) -> None:
    options: dict[str, Any] = {"beta": 0.1} if more == "reference" else {}
    kind = ScriptedFields if "ratios" in more else Scripted
    made = scripted(tmp_path, buffer, kind, pad_to_multiple_of=4, **options)
    made.sampled, made.tools_called = more == "sampled" or "ratios" in more, more == "tools"
    if "ratios" in more:
        made.vllm_importance_sampling_mode = more.split()[0] + "_truncate"
        width = 1 if more.startswith("sequence") else None
        made.added = {
            LOGPS: lambda out: out["completion_ids"] * -0.1,
            "importance_sampling_ratio": lambda out: (
                1.0 + out["completion_ids"][:, :width] * out["completion_mask"][:, :width] * 0.1
            ),
        }
    before = made.step(0, GOOD)
    after = made.step(1, MIXED)
    stored = {one.group_uid: one for one in buffer.get(uids=["tiny/0/0/0", "tiny/0/0/1"])}
    found = rows(after, 0)
    for row_ in found:  # on-policy, TRL has none if nothing is replayed
        logps = row_.pop(LOGPS) if LOGPS not in before else None
        assert logps is None or max(logps) < 0
    assert found in (rows(before, 0), rows(before, 4))
    assert [one["prompt_ids"] for one in rows(after, 4)] == [[4]] * 4
    assert after["prompt_ids"].shape == after["prompt_mask"].shape == (8, 4)
    assert after["prompt_ids"][4].tolist() == [0, 0, 0, 4]
    assert after["completion_ids"].size(1) % 4 == 0
    padding = ~after["completion_mask"].bool()
    for name in set(after) & {LOGPS, "sampling_per_token_logps", "ref_per_token_logps"}:
        assert (after[name][padding] == 0.0).all()
        assert after[name].dtype == torch.float32
    if more == "token ratios":
        assert (after["importance_sampling_ratio"][padding] == 1.0).all()
    if more == "sequence ratios":
        assert after["importance_sampling_ratio"].shape == (8, 1)
    mask = after["completion_mask"] * after.get("tool_mask", 1)
    assert after["num_items_in_batch"] == mask.sum()
    assert all(field.dtype == before[name].dtype for name, field in after.items() if name in before)
    first = stored["tiny/0/0/0"].episodes[0]
    assert first.text == "e \0 a <eos>"
    assert first.num_loss_tokens == (2 if more == "tools" else 4)


def test_logprobs_are_of_the_generating_policy(buffer: blocking.Buffer, tmp_path: Path) -> None:
    made = scripted(tmp_path, buffer)
    before = made.step(0, GOOD)
    assert LOGPS not in before  # nothing replayed: bit for bit as in TRL
    with torch.no_grad():
        expected = made._get_per_token_logps_and_entropies(
            made.model,
            torch.cat([before["prompt_ids"], before["completion_ids"]], 1),
            torch.cat([before["prompt_mask"], before["completion_mask"]], 1),
            before["completion_ids"].size(1),
        )[0]
        for weight in made.model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    after = made.step(1, MIXED)
    found = after[LOGPS][0][: int(after["completion_mask"][0].sum())]
    assert any(torch.allclose(found, expected[i][: len(found)]) for i in range(8))


def test_groups_of_the_same_step_are_not_replayed(buffer: blocking.Buffer, tmp_path: Path) -> None:
    """Neither in the very first batch, nor in other batches of the same or a later step."""
    made = scripted(tmp_path, buffer)
    for _ in range(2):
        outputs = made.step(1, MIXED)
        assert outputs["completion_ids"][0].tolist() == [3, 1, 0]
        assert outputs["advantages"][:4].abs().max() <= TOLERANCE
    made.step(7, GOOD)
    assert made.step(1, MIXED)["completion_ids"][0].tolist() == [3, 1, 0]
    assert [draw.group_ids for draw in buffer.draws() if len(draw.group_ids) > 1] != []


def test_evaluation_stores_and_replays_nothing(buffer: blocking.Buffer, tmp_path: Path) -> None:
    made = scripted(tmp_path, buffer)
    made.step(0, GOOD)
    made.num_generations_eval = 4
    outputs = made.step(1, MIXED, mode="eval")
    assert outputs["completion_ids"][0].tolist() == [3, 1, 0]
    assert buffer.count() == 2


def test_fields_that_cannot_be_replayed_are_refused(
    buffer: blocking.Buffer, tmp_path: Path
) -> None:
    made = scripted(tmp_path, buffer, ScriptedFields)
    made.added = {"pixel_values": lambda out: torch.zeros(8, 3), "num_images": lambda out: [1] * 8}
    with pytest.raises(NotSupportedError, match="num_images, pixel_values"):
        made.step(0, GOOD)
    made.added = {"advantages": lambda out: torch.zeros(8, 5)}
    with pytest.raises(InvalidInputError, match="advantages"):
        made.step(0, GOOD)
    assert buffer.count() == 0


def test_trainer_settings_without_replay_are_refused(
    buffer: blocking.Buffer, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match="sync_ref_model"):
        trainer(tmp_path, buffer, beta=0.1, sync_ref_model=True)
    with pytest.raises(InvalidInputError, match="buffer"):
        trainer(tmp_path, "sqlite:///grpo.db")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="policy"):
        trainer(tmp_path, buffer, replay=Mix({"grpo": 1.0}))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("rate_limit", MinSize(6)), ("rate_limit", Queue(4)), ("max_times_sampled", 1)],
)
def test_buffer_settings_without_replay_are_refused(
    buffer: blocking.Buffer, tmp_path: Path, setting: str, value: Any
) -> None:
    buffer.update_settings(**{setting: value})
    with pytest.raises(InvalidInputError) as refused:
        trainer(tmp_path, buffer)
    assert refused.value.field == f"buffer.settings.{setting}"


def test_reward_functions_with_the_same_name(buffer: blocking.Buffer, tmp_path: Path) -> None:
    def ones(completions: list[Any], **kwargs: Any) -> list[float | None]:
        return [1.0] * len(completions)

    trainer(tmp_path, buffer, reward=[by_step, ones, by_step], max_steps=1).train()
    [group] = buffer.get(uids=["tiny/0/0/0"])
    assert [one.metadata["rewards"] for one in group.episodes] == [
        {"by_step/0": i % 2, "ones": 1.0, "by_step/2": i % 2} for i in range(4)
    ]


def test_other_fields_are_not_mixed_in(buffer: blocking.Buffer, tmp_path: Path) -> None:
    """Groups without engine logprobs do not replace groups with them."""
    made = scripted(tmp_path, buffer)
    made.step(0, GOOD)
    made.sampled = True
    assert made.step(1, MIXED)["completion_ids"][0].tolist() == [3, 1, 0]
    made.step(2, GOOD)
    assert made.step(3, MIXED)["completion_ids"][0].tolist() != [3, 1, 0]


def test_chats_become_training_sets(url: str, buffer: blocking.Buffer, tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(completions: list[Any], **kwargs: Any) -> list[float | None]:
        seen.extend(completions)
        return [float(i % 4) for i in range(len(completions))]

    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    trainer(tmp_path, buffer, reward=reward, prompts=chats, max_steps=1).train()
    cache = str(tmp_path / "cache")
    rows = sft_dataset(url, "grpo", cache_dir=cache)
    assert [row["completion"] for row in rows] == [seen[3], seen[7]]
    assert all(row["prompt"] in chats for row in rows)
    pairs = dpo_dataset(url, "grpo", cache_dir=cache)
    assert [row["chosen"] for row in pairs] == [seen[3], seen[7]]
    assert [row["rejected"] for row in pairs] == [seen[0], seen[4]]
    (group,) = buffer.get(uids="tiny/0/0/0")
    assert group.texts == [messages[0]["content"] for messages in seen[:4]]


def test_conversations_with_tools_become_training_sets(
    url: str, buffer: blocking.Buffer, tmp_path: Path
) -> None:
    """Models can choose numbers as arguments that JSON columns refuse."""
    call = {"name": "multiply", "arguments": {"a": 2**70, "b": math.inf}}
    made = scripted(tmp_path, buffer)
    made.chat = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "name": "multiply", "content": [{"type": "text", "text": "a"}, {1}]},
    ]
    made.step(0, GOOD)
    first, second = sft_dataset(url, "grpo", streaming=True)
    plain = {"role": "assistant", "content": "e \0 a <eos>"}
    result = {**made.chat[1], "content": [{"type": "text", "text": "a"}, "{1}"]}
    assert first["completion"] == [plain, made.chat[0], result]
    assert len(second["completion"]) == 3
    (group,) = buffer.get(uids="tiny/0/0/0")
    assert group.texts[0] == "e \0 a <eos>"  # all of its tokens


def test_truncated_completions_are_stored_completely(
    buffer: blocking.Buffer, tmp_path: Path
) -> None:
    made = scripted(tmp_path, buffer, mask_truncated_completions=True)
    script = [([2], [5, 6, 7], 1.0), *[([2], [3, 1], 0.0)] * 3]
    made.step(0, script * 2)
    (group,) = buffer.get(uids="tiny/0/0/0")
    assert group.episodes[0].response_ids.tolist() == [5, 6, 7]
    assert group.episodes[0].num_loss_tokens == 0
    outputs = made.step(1, [([4], [1], 0.1)] * 8)
    assert outputs["completion_ids"][0].tolist() == [5, 6, 7]
    assert outputs["completion_mask"].tolist() == [[0, 0, 0], *[[1, 1, 0]] * 3] * 2
    assert outputs["num_items_in_batch"] == 12


def test_unscorable_completions(buffer: blocking.Buffer, tmp_path: Path) -> None:
    made = scripted(tmp_path, buffer)
    none = [([2], [3, 1], None)] * 4
    made.step(0, [*none, ([2], [5, 1], None), *[([2], [5, 1], float(i)) for i in range(3)]])
    empty, some = buffer.get(uids=["tiny/0/0/0", "tiny/0/0/1"])
    assert (empty.status, some.status) == ("filtered", "completed")
    assert math.isnan(some.rewards[0])
    assert some.episodes[0].metadata["rewards"] == {"by_step": None}
    assert some.episodes[0].advantage == 0.0


def test_two_trainers_of_one_run(url: str, buffer: blocking.Buffer, tmp_path: Path) -> None:
    """Each finds the groups of the other; a repeated step creates no duplicates."""
    with blocking.Store.open(url, run="tiny") as other:
        first = scripted(tmp_path / "a", buffer)
        again = scripted(tmp_path / "b", other.buffer("grpo"))
        first.step(0, GOOD)
        assert again.step(1, MIXED)["completion_ids"][0].tolist()[:2] != [3, 1]
        again.step(0, GOOD)
    assert buffer.count() == 4
    assert {one.id for one in buffer.find(where=col.min_policy_version == 0)} == {5, 6}


@postgresql_nightly
def test_killed_and_resumed(url: str, tmp_path: Path, child: Child) -> None:
    """Killed in step 4 after a checkpoint of step 3, so generation is at other steps afterwards."""
    folder = str(tmp_path)
    assert child(train, url, folder, kill_at=4) == [-signal.SIGKILL]
    with blocking.Store.open(url, run="tiny") as store:
        found = store.buffer("grpo").find()
        assert {one.min_policy_version for one in found} == {0, 2, 4}
    assert child(train, url, folder, resume=True) == [0]
    with blocking.Store.open(url, run="tiny") as store:
        buffer = store.buffer("grpo")
        left = {one.id for one in found if one.min_policy_version == 4}
        again = buffer.find(ids=left)
        assert {one.status for one in again} == {"archived"}
        assert {one.status_reason for one in again} == {"training started again from step 3"}
        others = buffer.find(where=col.id.not_in(left))
        assert {one.min_policy_version for one in others} == {0, 2, 3, 5}
        assert "archived" not in {one.status for one in others}
        drawn = {draw.step: set(draw.group_ids) for draw in buffer.draws()}
        assert sorted(step for step in drawn if step is not None) == [0, 2, 3, 4, 5]
        assert left.isdisjoint(drawn[3] | drawn[5])
        assert {run.name for run in store.runs()} == {"tiny"}


@postgresql_nightly
def test_two_processes_have_their_own_groups(url: str, tmp_path: Path, child: Child) -> None:
    assert child(train_rank, url, str(tmp_path), free_port(), ranks=2) == [0, 0]
    with blocking.Store.open(url, run="tiny") as store:
        buffer = store.buffer("grpo")
        found = buffer.find(limit=100)
        assert sorted(one.group_uid for one in found) == [
            f"tiny/{step}/0/{i}" for step in range(2) for i in range(4)
        ]
        assert all(one.times_replaced == 0 for one in found)
        draws = [set(draw.group_ids) for draw in buffer.draws() if draw.step == 1]
        assert [len(ids) for ids in draws] == [2, 2]
        first = {one.id for one in found if one.min_policy_version == 0}
        assert set.union(*draws) <= first
        # One process replaces the two, and replays none of their groups.
        trainer(tmp_path, buffer, max_steps=2).train()
        assert {one.group_uid for one in buffer.find(statuses="archived")} == {
            f"tiny/{step}/0/{i}" for step in range(2) for i in (2, 3)
        }
        assert buffer.count(statuses=["completed", "filtered"]) == 4
