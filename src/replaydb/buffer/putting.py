"""The rollout worker's side of a buffer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, get_args

from sqlalchemy import Connection

from replaydb import checks
from replaydb.buffer.core import BufferCore
from replaydb.database.group_commit import Gate, GroupCommit, Submission
from replaydb.database.payloads import Payloads
from replaydb.database.records import (
    GroupRecord,
    PayloadRecord,
    check_puttable,
    to_episode_record,
    to_record,
)
from replaydb.database.repository import pieces, puts
from replaydb.database.repository.buffers import BufferRow, RunRow, find_or_add_run
from replaydb.database.repository.locked import Scope
from replaydb.database.repository.locking import tasks_locked
from replaydb.database.repository.packs import PackGoneError
from replaydb.database.repository.pieces import Addition
from replaydb.database.repository.puts import OnDuplicate, Put
from replaydb.database.transactions import Database, allowance, end_in
from replaydb.episodes import Episode, EpisodeGroup, GroupStatus
from replaydb.episodes.arrays import ArrayLike
from replaydb.episodes.flat import FlatEpisodes, flatten, restarts
from replaydb.errors import (
    BufferFullError,
    InvalidInputError,
    RateLimitedError,
    ReplayDBError,
)
from replaydb.results import RunInfo

logger = logging.getLogger(__name__)

#: Groups with more tokens than this together are encoded in a thread.
ENCODE_INLINE_TOKENS = 32_768

T = TypeVar("T")

#: What putting waits out.
_NO_ROOM = (RateLimitedError, BufferFullError)


class Putting(BufferCore):
    """Storing groups, whole or in pieces."""

    def __init__(
        self,
        database: Database,
        payloads: Payloads,
        row: BufferRow,
        run_name: str,
        run: Callable[[float], Awaitable[RunRow]],
    ) -> None:
        super().__init__(database, payloads, row, run_name, run)
        self._known_tasks: frozenset[str] = frozenset()
        self._is_restart_logged = False
        self._puts: GroupCommit[Put, list[int]] = GroupCommit(
            self._commit_puts, allowance, self._settling_seconds
        )
        self._additions: GroupCommit[Addition, GroupStatus] = GroupCommit(
            self._commit_additions, allowance, self._settling_seconds
        )

    async def put(
        self,
        groups: EpisodeGroup | Iterable[EpisodeGroup],
        *,
        on_duplicate: OnDuplicate = "error",
        priority: float | Callable[[EpisodeGroup], float] | None = None,
        cursor: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Store groups, all or none of them.

        When this returns they survive the death of any process, and every later sample of any
        process sees them. Concurrent puts of one process share transactions.

        Args:
            groups: One group or several; none is a no-op.
            on_duplicate: What to do about a `group_uid` the buffer already holds: raise, keep the
                stored group ("ignore"), or put the new one in its place: "replace" under the id it
                has, with its age and attempts; "renew" as a new group, with a new id, as if the
                stored one had been deleted, in one transaction.
            priority: Takes the place of the groups' own: a number, or a function of the group.
            cursor: JSON values by name, written in the same transaction: where a dataset stands.
                `Buffer.cursor` reads them.
            timeout: Seconds to wait for a rate limit, or for room among groups that are leased or
                still arriving; None waits for ever.

        Returns:
            The ids of the groups, in their order. A group that was refused, under
            `eviction="lowest_priority"`, has one too: it is archived under it already, without
            payload, its `status_reason` beginning with "refused", or, with `on_evict="delete"`,
            is not there.

        Raises:
            DuplicateGroupError: Under `on_duplicate="error"`.
            InvalidInputError: Not groups, one uid twice, a status that cannot be put, a priority
                that `update_priorities` would refuse, or more than the buffer's limits can take.
            RateLimitedError: The rate limit did not let them in, in time.
            BufferFullError: No room could be made in time.
            DatabaseError: The database refused.
        """
        several = _checked_put(groups, on_duplicate)
        cursors = checks.cursors("cursor", cursor)
        seconds = checks.seconds("timeout", timeout)
        if not several and not cursors:
            return []
        records = await self._encode(several, priority)
        return await self._submit(Put(records, on_duplicate, cursors), seconds)

    async def open_group(
        self,
        task_name: str,
        group_uid: str,
        expected_episodes: int,
        *,
        prompt_uid: str | None = None,
        deadline: float | None = None,
        min_episodes: int | None = None,
        priority: float = 1.0,
        tags: Mapping[str, Any] | None = None,
        prompt: str | Iterable[Mapping[str, Any]] | None = None,
        prompt_ids: ArrayLike | None = None,
        extras: Mapping[str, ArrayLike] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Begin a group whose episodes arrive one by one, from any process.

        Args:
            task_name: Its task.
            group_uid: Its uid, by which episodes are added.
            expected_episodes: How many episodes complete the group.
            prompt_uid: Id of its prompt in the dataset.
            deadline: Seconds after it is stored when it is completed with what it has, if that is
                at least `min_episodes`, and otherwise fails.
            min_episodes: See `deadline`; by default all that are expected.
            priority: Its priority.
            tags: JSON to keep with it.
            prompt: Text or chat messages, as for `EpisodeGroup`; kept if no episode ever arrives.
            prompt_ids: Tokens of the prompt.
            extras: Named arrays.
            timeout: Seconds to wait for a rate limit or for room; None waits for ever.

        Returns:
            Its id.

        Raises:
            DuplicateGroupError: The uid is taken.
            RateLimitedError: The rate limit did not let it in, in time.
            BufferFullError: No room could be made in time.
            InvalidInputError: An argument is wrong.
        """
        expected = checks.whole_number("expected_episodes", expected_episodes, least=1)
        least = None
        if min_episodes is not None:
            least = checks.whole_number("min_episodes", min_episodes, least=1)
            if least > expected:
                raise InvalidInputError("min_episodes", f"at most {expected}", min_episodes)
        group = EpisodeGroup(
            task_name,
            [],
            prompt_uid=prompt_uid,
            group_uid=checks.name("group_uid", group_uid),
            priority=priority,
            status=GroupStatus.PENDING,
            tags=tags,
            expected_episodes=expected,
            prompt=prompt,
            prompt_ids=prompt_ids,
            extras=extras,
        )
        limit = None
        if deadline is not None:
            limit = timedelta(seconds=checks.duration("deadline", deadline))
        record = replace(to_record(group, self.settings.compression), time_limit=limit)
        record.facts["min_episodes"] = least
        put = Put([record], "error")
        return (await self._submit(put, checks.seconds("timeout", timeout)))[0]

    async def add_episode(
        self,
        group_uid: str,
        episode: Episode,
        *,
        position: int | None = None,
        timeout: float | None = None,
    ) -> GroupStatus:
        """Add an episode to a group begun with `open_group`; the last one completes it.

        Args:
            group_uid: Uid of the group.
            episode: The episode.
            position: Which of the expected episodes it is, from 0: makes a call that is repeated
                after a lost answer recognisable. By default the next free one.
            timeout: Seconds to wait for room; None waits for ever.

        Returns:
            The status of the group now: `pending`, `completed`, or `expired` where it is too
            stale already.

        Raises:
            UnknownGroupError: There is no such group.
            GroupClosedError: It takes no more episodes.
            DuplicateEpisodeError: The position is taken; the stored episode was kept.
            BufferFullError: No room could be made in time.
            InvalidInputError: An argument is wrong.
        """
        checks.name("group_uid", group_uid)
        checks.instance("episode", episode, Episode)
        if position is not None:
            position = checks.whole_number("position", position)
        flat = flatten([episode])
        record = to_episode_record(flat, episode.text, self.settings.compression)
        self._log_restart(group_uid, flat)
        addition = Addition(group_uid, position, record)
        submission = Submission(addition, (), record.num_bytes)
        async with self._patience(checks.seconds("timeout", timeout)) as patience:
            while True:
                try:
                    return await self._additions.submit(submission, patience.end)
                except BufferFullError as error:
                    await patience.wait(error)

    async def drain(self) -> None:
        """Wait until every put under way has been answered."""
        await self._puts.drain()
        await self._additions.drain()

    async def _give_up(self) -> None:
        """Answer every put under way with `StoreClosedError`."""
        await self._puts.give_up()
        await self._additions.give_up()

    def _settling_seconds(self) -> float:
        return self._database.backend.settling_seconds

    async def _put_copies(self, copies: Sequence[EpisodeGroup], run: RunInfo | None) -> None:
        """Store groups of a run, of this or another store; what is there already stays."""
        if run is None:
            origin = RunRow((await self._run(end_in(allowance()))).id, None)
        else:
            origin = await self._database.write(
                lambda connection: find_or_add_run(
                    connection, run.name, run.lineage, run.metadata, run.started_at
                )
            )
        records = await self._encode(copies, None)
        await self._submit(Put(records, "ignore", of_run=origin), None)

    async def _encode(
        self,
        several: Sequence[EpisodeGroup],
        priority: float | Callable[[EpisodeGroup], float] | None,
    ) -> list[GroupRecord]:
        compression = self.settings.compression

        def encode() -> list[GroupRecord]:
            for group in several:
                for part in group.parts:
                    self._log_restart(group.group_uid, part)
            return [to_record(group, compression, priority) for group in several]

        if sum(group.num_tokens for group in several) > ENCODE_INLINE_TOKENS:
            return await asyncio.to_thread(encode)
        return encode()

    def _log_restart(self, group_uid: str, flat: FlatEpisodes) -> None:
        """Log the first turn that does not continue the one before, once for this object.

        Agents that shorten their context do that on purpose, so it is never refused.
        """
        if self._is_restart_logged:
            return
        for episode, turn in restarts(flat):
            self._is_restart_logged = True
            logger.warning(
                "buffer %r: the prompt of turn %d (from 0) of episode %d of group %r does not begin"
                " with the tokens of the turns before it, so merging begins a new training row"
                " there; unless the context was shortened on purpose, give each turn its whole"
                " context. This is logged once",
                self.name,
                turn,
                episode,
                group_uid,
            )
            return

    async def _submit(self, put: Put, timeout: float | None) -> list[int]:
        num_bytes = sum(record.facts["num_bytes"] for record in put.records)
        uids = [record.uid for record in put.records]
        async with self._patience(timeout) as patience:
            while True:
                # Cursors of two puts may be the same; only uids keep them out of one transaction.
                submission = Submission(put, uids, num_bytes)
                try:
                    return await self._puts.submit(submission, patience.end)
                except _NO_ROOM as error:
                    put = replace(put, was_refused=True)
                    await patience.wait(error)

    async def _commit_puts(
        self, several: Sequence[Put], gate: Gate, end: float
    ) -> Sequence[list[int] | Exception]:
        def work(connection: Connection, scope: Scope) -> list[list[int] | ReplayDBError]:
            with gate:
                outcomes = puts.put(connection, scope, self._known_tasks, several)
            refused = all(isinstance(outcome, ReplayDBError) for outcome in outcomes)
            # A new pack is entered in any case: what is in it is not to be written again.
            if refused and all(part.pack is None or part.pack.is_kept for part in payloads):
                raise _RefusedError(outcomes)
            return outcomes

        payloads = [part for put in several for record in put.records for part in record.payloads]
        try:
            outcomes = await self._store(payloads, work, gate, end)
        except _RefusedError as refused:
            return refused.outcomes
        self._known_tasks |= {record.task_name for put in several for record in put.records}
        self._database.signal.announce()
        return outcomes

    async def _commit_additions(
        self, several: Sequence[Addition], gate: Gate, end: float
    ) -> Sequence[GroupStatus | Exception]:
        def work(connection: Connection, scope: Scope) -> list[GroupStatus | ReplayDBError]:
            found = pieces.targets(connection, scope.buffer_id, several)
            names = {row.task_name for row in found.values()}
            with gate, tasks_locked(connection, scope, names) as buffer:
                return pieces.add(buffer, {uid: row.id for uid, row in found.items()}, several)

        payloads = [addition.record.payload for addition in several]
        outcomes = await self._store(payloads, work, gate, end)
        self._database.signal.announce()
        return outcomes

    async def _store(
        self,
        payloads: Sequence[PayloadRecord],
        work: Callable[[Connection, Scope], T],
        gate: Gate,
        end: float,
    ) -> T:
        """One transaction that refers to payloads, which are where they belong before it begins."""
        while True:
            if self._row.outside:
                await self._payloads.put(payloads, end)
            packs = {part.pack for part in payloads if part.pack is not None}
            try:
                result = await self._write(work, end, hear_by=gate.hear_by, undone=gate.open)
            except PackGoneError as error:
                for pack in packs:
                    pack.is_gone = not pack.is_kept or pack.id in error.ids
                continue
            for pack in packs:
                pack.is_kept = True
            if packs:
                self._payloads.tidy_soon()
            return result


class _RefusedError(Exception):
    """No put of a transaction was let in: there is nothing to commit, and nobody to wake.

    Those who wait would otherwise wake each other, and themselves, without end.
    """

    def __init__(self, outcomes: Sequence[list[int] | ReplayDBError]) -> None:
        super().__init__()
        self.outcomes = outcomes


def _checked_put(groups: Any, on_duplicate: str) -> Sequence[EpisodeGroup]:
    checks.one_of("on_duplicate", on_duplicate, get_args(OnDuplicate))
    given = [groups] if isinstance(groups, EpisodeGroup) else groups
    expected = "an EpisodeGroup (of a task_name and episodes) or a sequence of them"
    several = checks.instances("groups", given, EpisodeGroup, expected)
    uids: set[str] = set()
    for i, group in enumerate(several):
        check_puttable(group)
        if group.group_uid in uids:
            raise InvalidInputError(
                f"groups[{i}].group_uid", "a uid used once in a put", repr(group.group_uid)
            )
        uids.add(group.group_uid)
    return several
