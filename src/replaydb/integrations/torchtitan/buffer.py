"""torchtitan's work buffer, in a store."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError
from torchtitan.experiments.rl.components import work_buffer
from torchtitan.experiments.rl.observability import metrics as m
from torchtitan.experiments.rl.rollout import RolloutGroup
from torchtitan.observability import structured_logger

import replaydb as rdb
from replaydb import blocking
from replaydb.integrations.decoding import decoded_one
from replaydb.integrations.torchtitan.rollouts import TASK, to_group, to_rollout_group
from replaydb.integrations.values import is_same

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: Taken by `take_finalized`: a group that failed, and so has no rollouts, is one too.
_FINALIZED = ("completed", "failed")
_IN_BUFFER = ("pending", *_FINALIZED)
#: What has a slot; "leased" is what was taken and not released yet.
_ACTIVE = (*_IN_BUFFER, "leased")
#: Another has the group, or had it; or the buffer was closed meanwhile.
_DROPPED = (rdb.LeaseExpiredError, rdb.NotEnoughGroupsError, rdb.StoreClosedError)


class RolloutGroupWorkBuffer(work_buffer.RolloutGroupWorkBuffer):
    """torchtitan's work buffer in a store: what waits, is in flight or finalised is still there
    after a restart.

    In flight and taken are leases, which this process extends while it lives. Where it dies, what
    it had in flight waits again, and what it had taken is finalised again, `ttl` seconds later at
    most. Several processes may work on one buffer.

    A `group_id` that is known, also from before a restart, is passed over by `add_work` and takes
    no slot; so a data loop that counts from 0 again goes through what was there without
    generating it twice.
    """  # noqa: D205

    @dataclass(kw_only=True, slots=True)
    class Config(work_buffer.RolloutGroupWorkBuffer.Config):
        """Where the work is kept.

        Attributes:
            url: Of the store, as `replaydb.Store.open` takes it.
            buffer: Name of the buffer; one for each training run.
            run: Name of the run, as `replaydb.Store.open` takes it.
            sample_type: What the rollouter's dataset gives: a dataclass, or anything else that
                pydantic can write as JSON and read back. By default it is JSON as it is.
            ttl: Seconds that work in the hands of a process that died stays there.
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
        # For `metrics`, which cannot wait; and so what is wrong with the store is said at once.
        self._blocking = blocking.Store.open(config.url, run=config.run)
        try:
            self._gauged = self._blocking.buffer(config.buffer)
        except BaseException:
            self._blocking.close()
            raise
        self._closed = False
        self._store: rdb.Store | None = None
        self._opening = asyncio.Lock()
        self._claimed: dict[int, rdb.Lease] = {}
        self._taken: deque[rdb.Lease] = deque()  # a group that was lost may be there twice
        self._peak = 0

    async def wait_for_slot(self) -> bool:
        """Wait until a group may be added; False once the buffer is closed."""
        with suppress(rdb.StoreClosedError):
            buffer = await self._open()
            most = self._max_active_rollout_groups
            return await buffer.wait_until(fewer_than=most, statuses=_ACTIVE)
        return False

    async def add_work(self, work: work_buffer.RolloutGroupWork) -> None:
        """Store a group that waits to be generated, and take a slot; a known one is passed over.

        Once the buffer is closed nothing is stored: the data loop of the next life comes to it.

        Raises:
            RuntimeError: There is no free slot.
            InvalidInputError: The sample would not come back as it is.
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
        """Take the oldest group that waits, to generate it; None once the buffer is closed.

        Raises:
            InvalidInputError: Its sample was stored by another `sample_type`.
        """
        with suppress(rdb.StoreClosedError):
            return await self._hold(self._claim, self._work, statuses="pending", timeout=None)
        return None

    async def finalize_work(self, rollout_group: RolloutGroup) -> None:
        """Store what was generated; it is dropped where another has the group by now, or had.

        Raises:
            InvalidInputError: It cannot be stored: a reward, say, is not finite. The group waits
                again.
        """
        group_id = rollout_group.group_id
        try:
            lease = await self._claim_of(group_id)
            async with AsyncExitStack() as stack:
                stack.push_async_exit(lease)  # ends the claim; after an error the group waits again
                group = to_group(rollout_group, prompt=lease.batch[0].prompt)
                await (await self._open()).put(group, on_duplicate="replace")
        except _DROPPED as error:
            logger.warning("rollout group %d was dropped: %s", group_id, error)
        if not self._closed:  # or `close` gives it back
            self._claimed.pop(group_id, None)

    async def take_finalized(self) -> RolloutGroup | None:
        """Take the oldest finalised group of the window; None once the buffer is closed."""
        with suppress(rdb.StoreClosedError):
            buffer = await self._open()
            while True:
                await buffer.wait_until(at_least=1, statuses=_IN_BUFFER)
                for head in await buffer.find(statuses=_IN_BUFFER, limit=1):
                    end = head.tags["group_id"] + self._window_size
                    window = rdb.col.tags["group_id"] < end
                    which = {"statuses": _FINALIZED, "where": window, "timeout": 1}
                    with suppress(rdb.NotEnoughGroupsError):  # the head may be another's by now
                        return await self._hold(self._taken.append, _finalized, **which)
        return None

    async def release_active_groups(self, count: int, *, reason: str) -> None:
        """Free the slots of groups that were taken.

        Those that are "trained" were taken first, and are archived. For any other reason it is
        those that were taken last, and they are `filtered`, with the reason. A group that was lost
        meanwhile (this process did not extend its lease) is in the buffer again, and keeps its
        slot. Once the buffer is closed nothing is released.

        Raises:
            ValueError: The count is negative.
            RuntimeError: This process has not taken so many.
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
        """Give back what is in hand, close the store, and so wake everybody who waits.

        The work stays there: what was in flight waits again, what was taken is finalised again.
        """
        if self._closed:
            return
        self._closed = True
        if self._store is not None:
            await self._store.close()  # first, or who waits here would take what is given back

        def give_back() -> None:
            for lease in (*self._claimed.values(), *self._taken):
                self._gauged.revoke(lease.id, reason="the work buffer was closed")
            self._blocking.close()

        await asyncio.to_thread(give_back)

    def metrics(self) -> list[m.Metric]:
        """What is in the buffer now, under torchtitan's names; the peak is this process's.

        Once it is closed it is empty.
        """
        groups: list[rdb.GroupInfo] = []
        with suppress(rdb.StoreClosedError):
            groups = self._gauged.find(statuses=_ACTIVE)
        pending = [one.lease_id for one in groups if one.status == "pending"]
        values = {
            "num_groups_waiting": pending.count(None),
            "num_groups_inflight": len(pending) - pending.count(None),
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

    async def _hold(
        self,
        keep: Callable[[rdb.Lease], None],
        decode: Callable[[rdb.StoredGroup], T],
        **which: Any,
    ) -> T:
        """Decode one group, and keep it until its lease is ended."""
        buffer = await self._open()
        lease = await buffer.lease(1, ttl=self._config.ttl, **which).__aenter__()
        try:
            found = await decoded_one(lease, decode)
        except BaseException as error:
            await lease.__aexit__(type(error), error, error.__traceback__)
            raise
        keep(lease)
        if self._closed:
            raise rdb.StoreClosedError
        return found

    def _work(self, group: rdb.StoredGroup) -> work_buffer.RolloutGroupWork:
        sample = self._samples.from_json(str(group.prompt))
        work = work_buffer.RolloutGroupWork(group_id=group.tags["group_id"], sample=sample)
        work.state = type(work.state)("inflight")
        return work

    def _claim(self, lease: rdb.Lease) -> None:
        self._claimed[lease.batch[0].tags["group_id"]] = lease

    async def _claim_of(self, group_id: int) -> rdb.Lease:
        """The claim of a group, taken anew where it was lost or never taken."""
        lease = self._claimed.get(group_id)
        if lease is not None:
            with suppress(rdb.LeaseExpiredError):
                await lease.extend()
                return lease
        which = rdb.col.group_uid == str(group_id)
        await self._hold(self._claim, lambda group: group, statuses="pending", where=which)
        return self._claimed[group_id]


def _finalized(group: rdb.StoredGroup) -> RolloutGroup:
    """The rollouts of a group; none if it failed because they could not be decoded."""
    try:
        return to_rollout_group(group)
    except Exception:
        if group.leased_from != "failed":
            raise
        logger.exception("rollout group %s has no rollouts", group.group_uid)
        return RolloutGroup(group_id=group.tags["group_id"], rollouts=[], metrics=[])


class _Samples:
    """Samples of a dataset as JSON, and back."""

    def __init__(self, kind: Any) -> None:
        try:
            self._adapter = TypeAdapter(kind)
        except PydanticSchemaGenerationError as error:
            expected = "a type that pydantic writes as JSON"
            raise rdb.InvalidInputError("sample_type", expected, repr(kind)) from error

    def to_json(self, sample: Any) -> str:
        """Return the JSON of a sample that comes back from it as it is."""
        cause: Exception | None = None
        try:
            text: str = self._adapter.dump_json(sample, warnings=False).decode()
            if is_same(self._adapter.validate_json(text), sample):
                return text
        except (PydanticSerializationError, ValidationError) as error:
            cause = error
        kind = type(sample).__name__
        expected = "a sample that JSON of `sample_type` gives back equal in values and types"
        raise rdb.InvalidInputError("sample", expected, kind) from cause

    def from_json(self, text: str) -> Any:
        """Return the sample of some JSON."""
        try:
            return self._adapter.validate_json(text)
        except ValidationError as error:
            expected = "the type of the samples that the buffer has"
            raise rdb.InvalidInputError("sample_type", expected, text[:100]) from error
