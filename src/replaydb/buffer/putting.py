"""Calls of a rollout worker: put groups, open incremental groups, add episodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import Any, get_args

from replaydb.buffer.core import BufferCore
from replaydb.buffer.joining import Joining
from replaydb.codec.sharing import repetition
from replaydb.database.payloads import Payloads
from replaydb.database.repository import incremental_groups, puts
from replaydb.database.repository.buffers import BufferRow, RunRow, find_or_add_run
from replaydb.database.repository.incremental_groups import Addition
from replaydb.database.repository.locked import Scope
from replaydb.database.repository.locking import tasks_locked
from replaydb.database.repository.packs import PackGoneError, record_unused
from replaydb.database.repository.puts import OVERWRITING, OnDuplicate, Put
from replaydb.database.runtime.group_commit import Gate, GroupCommit, Submission
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import Database, allowance, end_in
from replaydb.database.tables.records import (
    GroupRecord,
    PayloadRecord,
    Priority,
    check_puttable,
    to_episode_record,
    to_record,
)
from replaydb.domain import checks
from replaydb.domain.episodes import Episode, EpisodeGroup, GroupStatus
from replaydb.domain.episodes.arrays import ArrayLike
from replaydb.domain.episodes.merging import restarts
from replaydb.domain.results import RunInfo
from replaydb.errors import (
    BufferFullError,
    InvalidInputError,
    RateLimitedError,
    ReplayDBError,
)

logger = logging.getLogger(__name__)

#: Groups with more tokens than this together are encoded in a thread.
ENCODE_INLINE_TOKENS = 32_768

#: Extras that are stored again for shared tokens are logged from this size, and this share of a
#: payload, on.
LOGGED_REPEATED_BYTES, LOGGED_REPEATED_SHARE = 64 << 10, 0.25

#: Each position of an incremental group is a row from the beginning.
MOST_EPISODES = 65_536

#: Errors after which a put waits and tries again.
_RETRIED_ERRORS = (RateLimitedError, BufferFullError)


class Putting(BufferCore):
    """Put complete groups, and build groups episode by episode."""

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
        self._is_restart_logged = self._is_repetition_logged = False
        shown = self._database.backend.shown
        self._puts: GroupCommit[Put, list[int]] = GroupCommit(
            shown, lambda *batch: self._commit(puts.put, *batch), allowance, self._settling_seconds
        )
        self._additions: GroupCommit[Addition, GroupStatus] = GroupCommit(
            shown, lambda *batch: self._commit(_add, *batch), allowance, self._settling_seconds
        )

        self._joining = Joining(payloads, lambda: self._row)

    async def put(
        self,
        groups: EpisodeGroup | Iterable[EpisodeGroup],
        *,
        on_duplicate: OnDuplicate = "error",
        priority: Priority | Callable[[EpisodeGroup], Priority] | None = None,
        cursor: Mapping[str, Any] | None = None,
        if_match: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Store groups, all of them or none.

        When `put` returns, the groups survive the death of any process, and every later draw in any
        process can take them. Concurrent puts of one process share transactions.

        Args:
            groups: One group or an iterable of groups. An empty iterable stores only `cursor`.
            on_duplicate: What to do if a `group_uid` is already in the buffer.

                - "error" (default): raise `DuplicateGroupError`.
                - "ignore": keep the stored group. It is not evicted for the other groups.
                - "replace": overwrite the stored group. Its id and age stay, and if the new one is
                  not completed, its attempts. A consumed group (archived, but not by an eviction)
                  is not replaced. If the stored group was evicted, or the new one could be removed
                  at once because of the age of the stored one, this is "renew".
                - "renew": delete the stored group and store the new one under a new id, in one
                  transaction.
            priority: Sampling priority instead of the groups' own: a number for all groups, or
                "max" for the highest priority of the completed and leased groups of their task that
                are stored when the put takes effect (1.0 if there are none). Or a function that
                returns one of these for a group.
            cursor: JSON values by name, written in the same transaction, for example the position
                in the dataset. `Buffer.cursor` reads them.
            if_match: For groups that "replace" or "renew" overwrites, by uid, the `etag` that was
                read with them. If one has changed since, nothing is stored.
            timeout: Seconds to wait for the rate limit, or for capacity if the buffer is full of
                leased and pending groups. None (default) waits indefinitely. 0 is one attempt.

        Returns:
            Ids of the groups, in the order of `groups`. With `eviction="lowest_priority"` a group
            can be refused because of its low priority. It has an id, but is archived without
            payload and with a `status_reason` that begins with "refused" (with `on_evict="delete"`
            it is not stored).

        Raises:
            DuplicateGroupError: A `group_uid` is already in the buffer and `on_duplicate` is
                "error".
            ConsumedGroupError: A group that "replace" would overwrite was consumed.
            ContentChangedError: A stored group has another etag than in `if_match`, or is gone.
            InvalidInputError: An argument is invalid: `groups` has other objects than groups, a uid
                occurs twice, a group has a status that cannot be put or an invalid priority (see
                `update_priorities`), or the groups exceed the capacity of an empty buffer.
            RateLimitedError: The rate limit blocked the put until `timeout`.
            BufferFullError: No capacity could be freed until `timeout`.
            DatabaseError: The database reported an error. Unless it is an `OutcomeUnknownError`,
                nothing was stored.
        """
        several = _checked_put(groups, on_duplicate)
        cursors = checks.cursors("cursor", cursor)
        seconds = checks.seconds("timeout", timeout)
        if not several and not cursors:
            return []
        etags = checks.etags("if_match", if_match)
        given = {one.group_uid for one in several} if on_duplicate in OVERWRITING else set()
        if others := sorted(etags.keys() - given):
            expected = 'uids of `groups`, with on_duplicate="replace" or "renew"'
            raise InvalidInputError("if_match", expected, others)
        records = await self._encode(several, priority)
        return await self._submit(Put(records, on_duplicate, cursors, etags), seconds)

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
        """Open an incremental group: its episodes are added one by one, from any process.

        The group is `pending` until its last episode is added. Its age counts from this call, so a
        group that is completed after `time_to_live` is evicted by the next put or draw. A shorter
        `deadline` prevents that.

        Args:
            task_name: Name of its task.
            group_uid: Its uid, by which `add_episode` finds it.
            expected_episodes: Number of episodes that complete the group.
            prompt_uid: Id of its prompt in the dataset.
            deadline: Seconds from now until the group stops accepting episodes. It is then
                completed if it has at least `min_episodes` episodes, and otherwise fails. None
                (default): no deadline.
            min_episodes: Smallest number of episodes that is enough at the deadline. Default:
                `expected_episodes`.
            priority: Its sampling priority.
            tags: JSON values by name to store with it.
            prompt: The prompt as text or chat messages, as for `EpisodeGroup`. It is stored even if
                no episode is ever added.
            prompt_ids: Token ids of the prompt, int, shape (tokens,).
            extras: Arrays by name, such as images, to store with the group.
            timeout: Seconds to wait for the rate limit or for capacity. None (default) waits
                indefinitely.

        Returns:
            Id of the group.

        Raises:
            DuplicateGroupError: The uid is already in the buffer.
            RateLimitedError: The rate limit blocked the call until `timeout`.
            BufferFullError: No capacity could be freed until `timeout`.
            InvalidInputError: An argument is invalid.
        """
        expected = checks.whole_number(
            "expected_episodes", expected_episodes, least=1, most=MOST_EPISODES
        )
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
        record = to_record(group, self.settings.compression, version=self._row.write_format)
        record = replace(record, time_limit=limit)
        record.facts["min_episodes"] = least
        self._check_size("the prompt and extras", record.facts["num_bytes"])
        put = Put([record], "error")
        return (await self._submit(put, checks.seconds("timeout", timeout)))[0]

    async def add_episode(
        self,
        group_uid: str,
        episode: Episode,
        *,
        position: int | None = None,
        tags: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> GroupStatus:
        """Add an episode to a group that was opened with `open_group`. The last one completes it.

        Args:
            group_uid: Uid of the group.
            episode: The episode.
            position: Index of the episode in the group, from 0. Pass it if you may repeat the call,
                for example after a lost connection: the repeated call then raises
                `DuplicateEpisodeError` instead of adding the episode twice. Default: the next free
                position.
            tags: JSON values by name, merged into the tags of the group in the same transaction.
            timeout: Seconds to wait for capacity that leased groups use. None (default) waits
                indefinitely.

        Returns:
            Status of the group now: `pending`, `completed`, or `expired` if the completed group is
            too stale. Several concurrent calls for a group can return `completed`.

        Raises:
            UnknownGroupError: The group does not exist.
            GroupClosedError: The group accepts no more episodes.
            DuplicateEpisodeError: There is already an episode at `position`. It was kept.
            BufferFullError: No capacity could be freed until `timeout`.
            InvalidInputError: An argument is invalid, or another turn of the group has the uid of
                a turn.
        """
        checks.name("group_uid", group_uid)
        if position is not None:
            position = checks.whole_number("position", position, most=checks.INT32[1])
        return await self._add(group_uid, episode, position, timeout, tags=tags)

    async def _add(
        self,
        group_uid: str,
        episode: Episode,
        position: int | None,
        timeout: float | None,
        *,
        tags: Mapping[str, Any] | None,
        **more: Any,
    ) -> GroupStatus:
        """Add an episode to an incremental group. `more`: further attributes of the `Addition`."""
        checks.instance("episode", episode, Episode)
        new_tags = checks.json_object("tags", tags)
        seconds = checks.seconds("timeout", timeout)
        compression, version = self.settings.compression, self._row.write_format
        if not episode.is_whole:
            expected = "one of which all extras were read, without `fields`"
            raise InvalidInputError("episode", expected, repr(episode))
        record = to_episode_record(episode, compression, version)
        self._check_size("episode", record.num_bytes)
        self._log_restart(group_uid, [episode], [record.facts])
        self._log_repetition(group_uid, record.payloads)
        size = record.num_bytes + len(record.text or "")
        return await self._end(
            Addition(group_uid, position, record, tags=new_tags, **more), size, seconds
        )

    async def _end(self, addition: Addition, size: int, timeout: float | None) -> GroupStatus:
        """End a trajectory."""
        submission = Submission(addition, (), size)
        async with self._waiter(timeout) as waiter:
            while True:
                try:
                    status = await self._additions.submit(submission, waiter.end)
                    break
                except BufferFullError as error:
                    await waiter.wait(error)
        if status is GroupStatus.COMPLETED:
            self._joining.join_soon(addition.group_uid)
        return status

    async def drain(self) -> None:
        """Wait until all running puts have finished, and completed groups are joined."""
        await self._puts.drain()
        await self._additions.drain()
        await self._joining.drain()

    async def _abort_puts(self) -> None:
        """Cancel all running puts: they raise `StoreClosedError`."""
        await self._puts.give_up()
        await self._additions.give_up()
        await self._joining.stop()

    def _settling_seconds(self) -> float:
        return self._database.backend.traits.settling_seconds

    async def _put_copies(self, copies: Sequence[EpisodeGroup], run: RunInfo | None) -> None:
        """Store copies of groups of a run of this or another store. Known uids are ignored."""
        if run is None:
            origin = RunRow((await self._run(end_in(allowance()))).id, None)
        else:
            origin = await self._database.write(
                lambda session: find_or_add_run(
                    session, run.name, run.lineage, run.metadata, run.started_at
                )
            )
        records = await self._encode(copies, None)
        await self._submit(Put(records, "ignore", of_run=origin), None)

    async def _encode(
        self,
        several: Sequence[EpisodeGroup],
        priority: Priority | Callable[[EpisodeGroup], Priority] | None,
    ) -> list[GroupRecord]:
        compression, version = self._row.settings.compression, self._row.write_format

        def encode() -> list[GroupRecord]:
            records = [to_record(group, compression, priority, version) for group in several]
            for group, record in zip(several, records, strict=True):
                self._log_restart(group.group_uid, group.episodes, record.episodes)
                self._log_repetition(group.group_uid, record.payloads)
            return records

        is_large = sum(map(_num_tokens, several)) > ENCODE_INLINE_TOKENS
        records = await asyncio.to_thread(encode) if is_large else encode()
        for i, record in enumerate(records):
            if record.facts["num_bytes"] > checks.MAX_BYTES:
                self._check_size(f"groups[{i}]", record.facts["num_bytes"])
        return records

    def _check_size(self, field: str, num_bytes: int) -> None:
        """Refuse a payload that no database can hold, before anything is sent."""
        if num_bytes > checks.MAX_BYTES and not self._row.uses_payload_store:
            raise InvalidInputError(
                field,
                f"a payload of at most {checks.MAX_BYTES} bytes; only outside the database, with "
                "`payloads=` of `Store.open`, it can be larger",
                f"{num_bytes} bytes",
            )

    def _log_restart(
        self, group_uid: str, episodes: Sequence[Episode], rows: Iterable[Mapping[str, Any]]
    ) -> None:
        """Log the first turn that does not continue an earlier one, once per buffer object.

        Agents that shorten their context do so on purpose, so it is not an error.
        """
        if self._is_restart_logged or all(row["longest_row"] == row["num_tokens"] for row in rows):
            return
        for episode, turn in restarts(episodes):
            self._is_restart_logged = True
            logger.warning(
                "buffer %r: the prompt of turn %d (from 0) of episode %d of group %r does not begin"
                " with all tokens of an earlier turn, so a new training row begins there. On"
                " average, a token of these episodes is stored %.1f times. Unless it is the turn of"
                " a sub-agent, or the context was changed on purpose, give each turn its whole"
                " context, and do not change the beginning of contexts (see docs/training.md). This"
                " is logged once",
                self.name,
                turn,
                episode,
                group_uid,
                repetition(episodes),
            )
            return

    def _log_repetition(self, group_uid: str, payloads: Sequence[PayloadRecord]) -> None:
        """Log the first extras whose values for shared tokens differ, once per buffer object."""
        if self._is_repetition_logged or not any(part.repeated for part in payloads):
            return
        several = [one for part in payloads for one in (part.repeated or {}).items()]
        repeated = sum(size for _, size in several)
        size = sum(part.expanded_bytes or 0 for part in payloads)
        if repeated < max(LOGGED_REPEATED_BYTES, LOGGED_REPEATED_SHARE * size):
            return
        self._is_repetition_logged = True
        logger.warning(
            "buffer %r: extras of group %r are stored again for tokens that its turns or episodes"
            " share, which takes %d of its %d bytes, most of them in %r. An extra of shared tokens"
            " is stored once if it is given with each turn and its dtype, shape and values are"
            " equal (see docs/payload.md). This is logged once",
            self.name,
            group_uid,
            repeated,
            size,
            max(several, key=itemgetter(1))[0],
        )

    async def _submit(self, put: Put, timeout: float | None) -> list[int]:
        num_bytes = sum(record.num_bytes for record in put.records)
        uids = [record.uid for record in put.records]
        async with self._waiter(timeout) as waiter:
            while True:
                # Puts that write the same cursor may share a transaction; puts of one uid may not.
                submission = Submission(put, uids, num_bytes)
                try:
                    return await self._puts.submit(submission, waiter.end)
                except _RETRIED_ERRORS as error:
                    put = replace(put, was_refused=True)
                    await waiter.wait(error)

    async def _commit(
        self, store: Callable[..., Sequence[Any]], several: Sequence[Any], gate: Gate, end: float
    ) -> Sequence[Any]:
        """Store puts or additions in one transaction. Packs of payloads are written before it."""
        payloads = [part for one in several for part in one.payloads]
        work = partial(store, known_tasks=self._known_tasks, several=several)
        while True:
            if self._row.uses_payload_store:
                await self._payloads.put(payloads, end)
            packs = {part.pack for part in payloads if part.pack is not None}
            try:
                outcomes: Sequence[Any] = await self._transact(
                    lambda scope: self._database.write(partial(work, scope), end=end, gate=gate),
                    end,
                    records_run=True,
                )
            except PackGoneError as error:
                for pack in packs:
                    pack.is_gone = not pack.is_committed or pack.id in error.ids
                continue
            except puts.RefusedError as refused:
                await self._record_unused(payloads, end)
                return refused.outcomes
            for pack in packs:
                pack.is_committed = True
            if packs:
                self._payloads.tidy_soon()
            self._known_tasks |= {
                name
                for one, outcome in zip(several, outcomes, strict=True)
                if not isinstance(outcome, ReplayDBError)
                for name in one.new_task_names
            }
            return outcomes

    async def _record_unused(self, payloads: Sequence[PayloadRecord], end: float) -> None:
        """Record new packs of refused puts: they are removed later, unless a retry uses them."""
        packs = {part.pack for part in payloads if part.pack is not None}
        if any(not pack.is_committed for pack in packs):
            with suppress(PackGoneError):
                await self._database.write(partial(record_unused, payloads=payloads), end=end)
                for pack in packs:
                    pack.is_committed = True


def _add(
    scope: Scope, session: Session, *, known_tasks: frozenset[str], several: Sequence[Addition]
) -> list[GroupStatus | ReplayDBError]:
    """Add episodes to groups. Their tasks exist."""
    found = incremental_groups.targets(session, scope.buffer_id, several)
    names = {row.task_name for row in found.values()}
    with tasks_locked(session, scope, names) as buffer:
        return incremental_groups.add(buffer, {uid: row.id for uid, row in found.items()}, several)


def _num_tokens(group: EpisodeGroup) -> int:
    """Return the number of tokens of a group that its turns do not share by name."""
    segments = [segment for episode in group.episodes for segment in episode.segments]
    return sum(segment.length - segment.shared for segment in segments)


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
                f"groups[{i}].group_uid", "a uid that occurs once in groups", repr(group.group_uid)
            )
        uids.add(group.group_uid)
    return several
