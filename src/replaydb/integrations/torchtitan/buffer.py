"""torchtitan's work buffer of rollout groups, in a store."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError
from torchtitan.experiments.rl.components import work_buffer
from torchtitan.experiments.rl.observability import metrics as m
from torchtitan.experiments.rl.rollout import RolloutGroup
from torchtitan.observability import structured_logger

import replaydb as rdb
from replaydb import blocking
from replaydb.integrations.decoding import decoded_one, reason_of
from replaydb.integrations.torchtitan.rollouts import TASK, to_group, to_rollout_group
from replaydb.integrations.values import is_same

logger = logging.getLogger(__name__)

#: Statuses that `take_finalized` takes. A failed group, which has no rollouts, is finalized too.
_FINALIZED = ("completed", "failed")
_IN_BUFFER = ("pending", *_FINALIZED)
#: Statuses of groups that take a slot; "leased" groups were taken and not released yet.
_ACTIVE = (*_IN_BUFFER, "leased")
#: Another process has or had the group, or the buffer was closed meanwhile.
_DROPPED = (rdb.ConsumedGroupError, rdb.GroupClosedError, rdb.StoreClosedError)


class RolloutGroupWorkBuffer(work_buffer.RolloutGroupWorkBuffer):
    """torchtitan's work buffer in a store. Waiting, in-flight and finalized work is durable.

    Groups in flight are claimed, those that were taken are leased, and this process extends its
    claims and leases while it is alive. If it dies, its groups in flight wait again, and groups
    that it had taken are finalized again, after at most `ttl` seconds. Several processes can share
    one buffer.

    `add_work` skips a `group_id` that is already known, even from before a restart, and assigns no
    slot to it. A data loop that counts from 0 again therefore generates nothing twice.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(work_buffer.RolloutGroupWorkBuffer.Config):
        """Configuration of the store.

        Attributes:
            url: URL of the store, as for `replaydb.Store.open`.
            buffer: Name of the buffer; one per training run.
            run: Name of the run, as for `replaydb.Store.open`.
            sample_type: Type of the samples of the rollouter's dataset: a dataclass, or another
                type that pydantic can write as JSON and read back. By default samples are JSON.
            ttl: Seconds until the work of a process that died is available again.
        """

        url: str
        buffer: str = "rollouts"
        run: str | None = None
        sample_type: Any = Any
        ttl: float = 60.0

    def __init__(
        self, config: Config, *, max_active_rollout_groups: int, window_size: int = 1
    ) -> None:
        super().__init__(
            config, max_active_rollout_groups=max_active_rollout_groups, window_size=window_size
        )
        if config.ttl <= 0:
            raise rdb.InvalidInputError("ttl", "more than 0", config.ttl)
        self._config = config
        self._samples = _Samples(config.sample_type)
        # For `metrics`, which is not a coroutine. It also reports an unusable store at once.
        self._blocking = blocking.Store.open(config.url, run=config.run)
        try:
            self._blocking_buffer = self._blocking.buffer(config.buffer)
        except BaseException:
            self._blocking.close()
            raise
        self._closed = False
        self._store: rdb.Store | None = None
        self._opening = asyncio.Lock()
        self._claimed: dict[int, rdb.Claim] = {}
        self._taken: deque[rdb.Lease] = deque()  # a lost group can be in it twice
        self._peak = 0

    async def wait_for_slot(self) -> bool:
        """Wait for a free slot. Return False once the buffer is closed."""
        with suppress(rdb.StoreClosedError):
            buffer = await self._open()
            most = self._max_active_rollout_groups
            return await buffer.wait_until(fewer_than=most, statuses=_ACTIVE)
        return False

    async def add_work(self, work: work_buffer.RolloutGroupWork) -> None:
        """Store a waiting group, and take a slot. A known group is skipped.

        Nothing is stored once the buffer is closed: the data loop adds the group after a restart.

        Raises:
            RuntimeError: There is no free slot.
            InvalidInputError: The sample would not be read back unchanged.
        """
        sample = self._samples.to_json(work.sample)
        uid, tags = str(work.group_id), {"group_id": work.group_id}
        with suppress(rdb.DuplicateGroupError, rdb.StoreClosedError):
            buffer = await self._open()
            active = await buffer.count(statuses=_ACTIVE)
            if active >= self._max_active_rollout_groups:
                raise RuntimeError(f"no free slot: {active} rollout groups are active")
            await buffer.open_group(TASK, uid, 1, tags=tags, prompt=sample)
            self._peak = max(self._peak, active + 1)

    async def claim_next(self) -> work_buffer.RolloutGroupWork | None:
        """Claim the oldest waiting group for generation. Return None once the buffer is closed.

        Raises:
            InvalidInputError: Its sample was stored with another `sample_type`.
        """
        with suppress(rdb.StoreClosedError):
            buffer = await self._open()
            [claim] = await buffer.claim(ttl=self._config.ttl)
            return await self._keep(claim)
        return None

    async def finalize_work(self, rollout_group: RolloutGroup) -> None:
        """Store a generated group. It is dropped if another process has or had the group.

        A group that cannot be stored, for example because a reward is not finite, becomes `failed`
        with the error as its `status_reason`. It is then taken like a group that the rollouter
        failed to generate, and counted as one.
        """
        group_id = rollout_group.group_id
        try:
            claim = await self._claim_of(group_id)
            async with AsyncExitStack() as stack:
                stack.push_async_exit(claim)  # ends the claim; after an error the group waits again
                buffer, prompt = await self._open(), claim.group.prompt
                try:
                    await buffer.put(to_group(rollout_group, prompt=prompt), on_duplicate="replace")
                except rdb.InvalidInputError as error:
                    logger.error("rollout group %d cannot be stored: %s", group_id, error)
                    failure = m.Metric("rollout/group_failures", m.Sum(1.0))
                    failed = replace(rollout_group, rollouts=[], metrics=[failure])
                    ids = await buffer.put(to_group(failed, prompt=prompt), on_duplicate="replace")
                    why = reason_of("stored", error)
                    await buffer.update(ids, statuses="failed", reason=why)
        except _DROPPED as error:
            logger.warning("rollout group %d was dropped: %s", group_id, error)
        if not self._closed:  # otherwise `close` releases it
            self._claimed.pop(group_id, None)

    async def take_finalized(self) -> RolloutGroup | None:
        """Take the oldest finalized group of the window. Return None once the buffer is closed."""
        with suppress(rdb.StoreClosedError):
            buffer = await self._open()
            while True:
                await buffer.wait_until(at_least=1, statuses=_IN_BUFFER)
                for head in await buffer.find(statuses=_IN_BUFFER, limit=1):
                    end = head.tags["group_id"] + self._window_size
                    window = rdb.col.tags["group_id"] < end
                    which = {"statuses": _FINALIZED, "where": window, "timeout": 1}
                    with suppress(rdb.NotEnoughGroupsError):  # another process took the head
                        return await self._take(buffer, **which)
        return None

    async def release_active_groups(self, count: int, *, reason: str) -> None:
        """Free the slots of groups that this process took.

        With the reason "trained", the groups that were taken first become `archived`. With any
        other reason, the groups that were taken last become `filtered`, with that reason. A group
        that was lost (this process did not extend its lease in time) is in the buffer again and
        keeps its slot. Nothing is released once the buffer is closed.

        Args:
            count: Number of groups.
            reason: Why they are released.

        Raises:
            ValueError: The count is negative.
            RuntimeError: This process has taken fewer groups.
        """
        if self._closed:
            return
        if count < 0:
            raise rdb.InvalidInputError("count", "at least 0", count)
        if count > len(self._taken):
            raise RuntimeError(f"released {count} groups, of {len(self._taken)} that were taken")
        is_trained = reason == "trained"
        for _ in range(count):
            lease = self._taken.popleft() if is_trained else self._taken.pop()
            try:
                async with AsyncExitStack() as stack:
                    stack.push_async_exit(lease)
                    if not is_trained:
                        await lease.reject(reason=reason)
            except rdb.LeaseExpiredError as error:
                group_id = lease.batch[0].tags["group_id"]
                logger.warning("rollout group %d is not released: %s", group_id, error)
        structured_logger.log_trace_scalar({f"rollout_buffer/released/{reason}": float(count)})

    async def close(self) -> None:
        """Release claimed and taken groups, and close the store, which ends all waiting calls.

        The work is kept: groups in flight wait again, taken groups are finalized again.
        """
        if self._closed:
            return
        self._closed = True
        if self._store is not None:
            await self._store.close()  # first, or waiting calls would take the released groups

        def release() -> None:
            why = "the work buffer was closed"
            for claim in self._claimed.values():
                with suppress(rdb.ClaimExpiredError):
                    self._blocking_buffer.release_claim(claim.uid, reason=why)
            for lease in self._taken:
                self._blocking_buffer.revoke(lease.id, reason=why)
            self._blocking.close()

        await asyncio.to_thread(release)

    def metrics(self) -> list[m.Metric]:
        """Return the current counts of groups under torchtitan's names.

        The peak is the one seen by this process. All groups count as absent once the buffer is
        closed.
        """
        groups: list[rdb.GroupInfo] = []
        pending: list[rdb.TrajectoryInfo] = []  # one for each pending group
        with suppress(rdb.StoreClosedError):
            groups = self._blocking_buffer.find(statuses=_ACTIVE)
            pending = self._blocking_buffer.trajectories(limit=len(groups) + 1)
        num_claimed = sum(one.claim_uid is not None for one in pending)
        values = {
            "num_groups_waiting": len(pending) - num_claimed,
            "num_groups_inflight": num_claimed,
            "num_groups_finalized": sum(one.status in _FINALIZED for one in groups),
            "active_slots_in_use_peak": max(self._peak, len(groups)),
            "available_active_slots": self._max_active_rollout_groups - len(groups),
        }
        self._peak = len(groups)
        return [
            m.Metric(f"rollout_buffer/{name}", m.NoReduce(float(value)))
            for name, value in values.items()
        ]

    async def _open(self) -> rdb.Buffer:
        async with self._opening:
            if self._store is None:
                if self._closed:
                    raise rdb.StoreClosedError
                self._store = await rdb.Store.open(self._config.url, run=self._config.run)
            return await self._store.buffer(self._config.buffer)

    async def _keep(self, claim: rdb.Claim) -> work_buffer.RolloutGroupWork:
        """Return the work of a claim, which `finalize_work` or `close` ends."""
        async with AsyncExitStack() as stack:
            group = (await stack.enter_async_context(claim)).group
            sample = self._samples.from_json(str(group.prompt))
            stack.pop_all()
        work = work_buffer.RolloutGroupWork(group_id=group.tags["group_id"], sample=sample)
        work.state = type(work.state)("inflight")
        self._claimed[work.group_id] = claim
        if self._closed:
            raise rdb.StoreClosedError
        return work

    async def _claim_of(self, group_id: int) -> rdb.Claim:
        """Return the claim of a group; claim it again if the claim was lost or never made.

        Raises:
            GroupClosedError: Another process has claimed or finalized the group.
        """
        claim = self._claimed.get(group_id)
        if claim is not None:
            with suppress(rdb.ClaimExpiredError):
                await claim.extend()
                return claim
        buffer = await self._open()
        which = rdb.col.group_uid == str(group_id)
        for claim in await buffer.claim(ttl=self._config.ttl, where=which, timeout=0):
            await self._keep(claim)
            return claim
        raise rdb.GroupClosedError(str(group_id), "in use or finalized")

    async def _take(self, buffer: rdb.Buffer, **which: Any) -> RolloutGroup:
        """Lease and decode a finalized group, which `release_active_groups` or `close` ends."""
        async with AsyncExitStack() as stack:
            taking = buffer.lease(1, ttl=self._config.ttl, **which)
            lease = await stack.enter_async_context(taking)
            found = await decoded_one(lease, _finalized)
            stack.pop_all()
        self._taken.append(lease)
        if self._closed:
            raise rdb.StoreClosedError
        return found


def _finalized(group: rdb.StoredGroup) -> RolloutGroup:
    """Return the rollouts of a group; none if it failed because they could not be decoded."""
    try:
        return to_rollout_group(group)
    except Exception:
        if group.leased_from != "failed":
            raise
        logger.exception("rollout group %s has no rollouts", group.group_uid)
        return RolloutGroup(group_id=group.tags["group_id"], rollouts=[], metrics=[])


class _Samples:
    """Conversion of dataset samples to JSON, and back."""

    def __init__(self, kind: Any) -> None:
        try:
            self._adapter = TypeAdapter(kind)
        except PydanticSchemaGenerationError as error:
            expected = "a type that pydantic writes as JSON"
            raise rdb.InvalidInputError("sample_type", expected, repr(kind)) from error

    def to_json(self, sample: Any) -> str:
        """Return a sample as JSON. Refuse it if it would not be read back unchanged."""
        cause: Exception | None = None
        try:
            text: str = self._adapter.dump_json(sample, warnings=False).decode()
            if is_same(self._adapter.validate_json(text), sample):
                return text
        except (PydanticSerializationError, ValidationError) as error:
            cause = error
        kind = type(sample).__name__
        expected = "a sample that JSON of `sample_type` preserves, equal in values and types"
        raise rdb.InvalidInputError("sample", expected, kind) from cause

    def from_json(self, text: str) -> Any:
        """Return a sample from its JSON."""
        try:
            return self._adapter.validate_json(text)
        except ValidationError as error:
            expected = "the type of the stored samples"
            raise rdb.InvalidInputError("sample_type", expected, text[:100]) from error
