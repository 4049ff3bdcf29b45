"""`GRPOTrainer` with replay: generations are stored, and replace zero-variance groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from replaydb import EpisodeGroup, GroupStatus, Prioritized, Share, blocking, col
from replaydb.errors import InvalidInputError
from replaydb.integrations.trl import chats
from replaydb.integrations.trl.outputs import (
    OLD,
    Scored,
    check,
    signature,
    to_fields,
    to_groups,
)
from replaydb.training import priorities

if TYPE_CHECKING:
    from torch import Tensor
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object

#: Statuses of the groups that are archived when training starts again at or before their step.
_RETIRABLE = (GroupStatus.COMPLETED, GroupStatus.EXPIRED, GroupStatus.FILTERED)

#: Rewards that differ by at most this much are equal.
TOLERANCE = 1e-6


class ReplayMixin(_Trainer):
    """A mixin that stores every generation of a `GRPOTrainer` and replays groups.

    Name it before the trainer class: `class MyReplayTrainer(ReplayMixin, MyTrainer)`.

    During training, each process stores the groups that it generated, with rewards, advantages and
    the log probabilities of the policy that generated them. A zero-variance group (all rewards
    equal) is replaced by a stored group of an earlier step whose rewards differ, as long as there
    is one. Nothing is stored or replayed during evaluation.

    If TRL does not compute `old_per_token_logps`, because generation is on-policy, this class
    computes them with one more forward pass per generation. Without them a replayed group would be
    trained on as if the current policy had generated it.

    Args:
        args: Arguments of the trainer, as are `kwargs`.
        buffer: The buffer that groups are stored in and replayed from. To resume from a checkpoint,
            its run must have a name: groups that are generated again then replace the groups of
            the same step.
        replay: The sampling strategy for stored groups, other than `Mix`; by default
            `Prioritized()`. Priorities are `sum |advantage| * std(rewards)`.

    Raises:
        InvalidInputError: The settings of the trainer or of the buffer do not permit replay.
        NotSupportedError: During training: the trainer produced fields that cannot be stored, such
            as pixels. Nothing of that step was stored.
    """

    def __init__(
        self,
        *args: Any,
        buffer: blocking.Buffer,
        replay: Any = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(buffer, blocking.Buffer):
            raise InvalidInputError("buffer", "a buffer of replaydb.blocking", repr(buffer))
        settings = buffer.settings
        if settings.rate_limit is not None:
            raise InvalidInputError(
                "buffer.settings.rate_limit",
                "None: a step cannot wait for groups of the next one",
                settings.rate_limit,
            )
        if settings.max_times_sampled == 1:
            raise InvalidInputError(
                "buffer.settings.max_times_sampled",
                "at least 2: the step that generates a group is the first to draw it",
                1,
            )
        policy = Prioritized() if replay is None else replay
        Share(1, policy)  # validates the sampling strategy
        super().__init__(*args, **kwargs)
        size = self.args.per_device_train_batch_size * self.args.steps_per_generation
        if size % self.num_generations:
            raise InvalidInputError(
                "per_device_train_batch_size * steps_per_generation",
                f"a multiple of num_generations, {self.num_generations}: whole groups",
                size,
            )
        if self.args.sync_ref_model and self.beta != 0.0:
            raise InvalidInputError(
                "sync_ref_model", "False: stored groups keep their ref_per_token_logps", True
            )
        self._buffer = buffer
        self._replay = policy
        self._scored: Scored | None = None
        self._generations = (-1, count())
        self.add_callback(_Resuming(self))

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(
            inputs, prompts, completions, completion_ids_list
        )
        first = self.accelerator.process_index * len(prompts)
        local = rewards[first : first + len(prompts)].cpu()
        totals = (local * self.reward_weights.cpu()).nansum(dim=1)
        totals[local.isnan().all(dim=1)] = math.nan
        names = [
            f"{name}/{i}" if self.reward_func_names.count(name) > 1 else name
            for i, name in enumerate(self.reward_func_names)
        ]
        texts, metadata = [], []
        for completion, ids, row in zip(
            completions, completion_ids_list, local.tolist(), strict=True
        ):
            text = chats.to_text(completion)
            more = chats.to_metadata(completion) if text is None else {}
            # The text of a completion that calls tools is all of its tokens.
            texts.append(self._tokenizer.decode(ids) if text is None else text)
            metadata.append({"rewards": dict(zip(names, map(_number, row), strict=True)), **more})
        lengths = [len(ids) for ids in completion_ids_list]
        self._scored = Scored(prompts, lengths, texts, metadata, totals)
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        outputs: dict[str, Any] = super()._generate_and_score_completions(inputs)
        scored, self._scored = self._scored, None
        if scored is None or not self.model.training:
            return outputs
        check(outputs)
        fields = outputs if OLD in outputs else {**outputs, OLD: self._behaviour_logps(outputs)}
        mode = self.vllm_importance_sampling_mode
        tags = {"trl_fields": signature(fields, mode)}
        step, size = self.state.global_step, self.num_generations
        fresh = to_groups(fields, scored, size=size, version=step, tags=tags)
        self._name(fresh)
        if replays := self._replays(fresh, tags["trl_fields"]):
            outputs = to_fields(
                [replays.get(i, group) for i, group in enumerate(fresh)],
                fields,
                ratio_mode=mode,
                pad_token_id=self._tokenizer.pad_token_id,
                pad_to_multiple_of=self.pad_to_multiple_of,
                device=self.accelerator.device,
            )
        mask = outputs["completion_mask"] * outputs.get("tool_mask", 1)
        # collective call: all processes must take part, even without replay
        total = self.accelerator.gather(mask.sum()).sum()
        return {**outputs, "num_items_in_batch": total}

    def _behaviour_logps(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """Return log probabilities [B, C] of the completions by the policy that generated them."""
        options = self.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(self.model, options):
            logps: Tensor = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([outputs["prompt_ids"], outputs["completion_ids"]], dim=1),
                torch.cat([outputs["prompt_mask"], outputs["completion_mask"]], dim=1),
                outputs["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
            )[0]
        return logps

    def _name(self, groups: list[EpisodeGroup]) -> None:
        """Name groups by step and position, so that a repeated step uses the same names."""
        step = self.state.global_step
        if self._generations[0] != step:
            self._generations = (step, count())
        nth, first = next(self._generations[1]), self.accelerator.process_index * len(groups)
        for i, group in enumerate(groups, first):
            group.group_uid = f"{self._buffer.run}/{step}/{nth}/{i}"

    def _replays(self, fresh: list[EpisodeGroup], signature: str) -> dict[int, EpisodeGroup]:
        """Store groups, and return replacements for zero-variance groups by position."""
        step = self.state.global_step
        if self.accelerator.is_main_process and self._buffer.policy_version != step:
            self._buffer.advance_policy(step, rewind=True)
        made = blocking.replace_uninformative(
            fresh,
            self._buffer,
            self._replay,
            tolerance=TOLERANCE,
            where=(col.reward_max - col.reward_min > TOLERANCE)
            & (col.max_policy_version < step)  # not of this step, in any process
            & (col.tags["trl_fields"] == signature),
            priority=priorities.advantage_times_std,
            on_duplicate="renew",  # also of groups that were consumed
            step=step,
        )
        replayed = set(made.replayed_ids)
        positions = [i for i in range(len(fresh)) if i not in made.missing]
        metrics = self._metrics["train"]
        metrics["replay/uninformative"].append(len(made.filtered_ids) / len(fresh))
        metrics["replay/replayed"].append(len(replayed) / len(fresh))
        return {i: one for i, one in zip(positions, made.batch, strict=True) if one.id in replayed}

    def _retire(self, step: int) -> None:
        """Archive the groups that this run stored at `step`, at which training starts, or later.

        A process generated them after the checkpoint and then ended, so they are not part of the
        training that continues. New groups do not replace all of them by name, because the steps
        at which this process generates, and the number of processes, can differ.
        """
        if self.accelerator.is_main_process:
            left = self._buffer.find(
                runs=self._buffer.run, statuses=_RETIRABLE, where=col.max_policy_version >= step
            )
            self._buffer.update(
                [one.id for one in left],
                statuses=_RETIRABLE,
                status=GroupStatus.ARCHIVED,
                reason=f"training started again from step {step}",
            )
        self.accelerator.wait_for_everyone()  # before any process stores groups of this step


class _Resuming(TrainerCallback):
    """Archives later groups of an earlier process when training starts."""

    def __init__(self, trainer: ReplayMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Archive the groups of `state.global_step`, at which training starts, and later."""
        self._trainer._retire(state.global_step)


class ReplayGRPOTrainer(ReplayMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` with replay: see `ReplayMixin`."""


def _number(value: float) -> float | None:
    """Return a reward; None for NaN, which is a missing reward."""
    return None if math.isnan(value) else value
