"""Calls on trajectories: claim them, append turns, and finish them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias
from uuid import uuid4

from sqlalchemy import ColumnElement

from replaydb import codec
from replaydb.batch.stored import StoredGroup
from replaydb.buffer.annotating import Annotating
from replaydb.buffer.claim import Claim
from replaydb.buffer.core import Work
from replaydb.buffer.drawing import Drawing
from replaydb.buffer.inspecting import Inspecting
from replaydb.buffer.putting import ENCODE_INLINE_TOKENS
from replaydb.database.filters import compiling
from replaydb.database.payloads import Payloads
from replaydb.database.repository import claims, trajectories, unfinished
from replaydb.database.repository.buffers import BufferRow, RunRow
from replaydb.database.repository.claims import ClaimTerms
from replaydb.database.repository.incremental_groups import Addition
from replaydb.database.repository.locked import Scope
from replaydb.database.repository.locking import tasks_locked
from replaydb.database.repository.trajectories import EPISODE, Append, Appended
from replaydb.database.runtime.group_commit import GroupCommit, Submission
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import BULK_SECONDS, Database, allowance, end_in
from replaydb.database.tables.records import Stored
from replaydb.database.tables.turn_records import (
    Parent,
    Unfinished,
    to_turn_record,
    unfinished_of,
)
from replaydb.domain import checks
from replaydb.domain.annotations import value_name
from replaydb.domain.episodes import Episode, GroupStatus, Turn
from replaydb.domain.episodes.arrays import ArrayLike
from replaydb.domain.results import TrajectoryInfo
from replaydb.errors import (
    ClaimExpiredError,
    CorruptPayloadError,
    DuplicateTurnError,
    InvalidInputError,
    NotEnoughGroupsError,
    PayloadGoneError,
    ReplayDBError,
    UnknownGroupError,
    UnknownTurnError,
)

logger = logging.getLogger(__name__)

#: Rows of the trajectories of each claim, by its uid.
Found: TypeAlias = Mapping[str, Sequence[Any]]


class Claiming(Annotating, Drawing, Inspecting):
    """Claim trajectories, append turns to them, and finish them; claim what episodes lack."""

    def __init__(
        self,
        database: Database,
        payloads: Payloads,
        row: BufferRow,
        run_name: str,
        run: Callable[[float], Awaitable[RunRow]],
    ) -> None:
        super().__init__(database, payloads, row, run_name, run)
        self._appends: GroupCommit[Append, Appended] = GroupCommit(
            self._database.backend.shown,
            lambda *batch: self._commit(trajectories.append, *batch),
            allowance,
            self._settling_seconds,
        )

    async def claim(
        self,
        n: int = 1,
        *,
        ttl: float,
        owner: str | None = None,
        tasks: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
        missing: str | None = None,
        whole_groups: bool = False,
        timeout: float | None = None,
    ) -> list[Claim]:
        """Claim open trajectories of incremental groups, those of the oldest groups first.

        A trajectory is a position of a group without an episode. Only the holder of its claim can
        add to it. If the claim expires, another process can claim the trajectory with all turns
        that were appended to it, and continue it.

        With `missing`, episodes are claimed that lack a value which the setting `requires` names:
        the work of judges and reference models, who add it with `Claim.annotate`.

        Args:
            n: Largest number of claims.
            ttl: Duration of a claim in seconds. If it is not extended in time, it expires, which
                counts as an attempt: at `max_attempts` of the buffer's settings the trajectory
                becomes unusable.
            owner: Name of the process, which `trajectories` shows. Default: host name and process
                id.
            tasks: Name or names of the tasks. Default: all tasks.
            where: Condition over `replaydb.col` that the groups must meet.
            missing: Name of a value, such as "reward". Default: trajectories are claimed.
            whole_groups: Whether each claim is of all open trajectories (or episodes without the
                value) of a group of which none is claimed.
            timeout: Seconds to wait until there is one. 0 is one attempt. None (default) waits
                indefinitely.

        Returns:
            1 to n claims; none if there was nothing to claim until `timeout`. Enter each with
            `async with`, or extend and release it yourself. Trajectories whose stored turns or
            prompt are damaged become unusable instead, and values of damaged groups are not waited
            for any more.

        Raises:
            InvalidInputError: An argument is invalid.
        """
        most = checks.whole_number("n", n, least=1)
        seconds = checks.duration("ttl", ttl)
        name = f"{socket.gethostname()}:{os.getpid()}" if owner is None else owner
        terms = ClaimTerms(
            checks.name("owner", name),
            seconds,
            checks.flag("whole_groups", whole_groups),
            compiling.checked(where),
            EPISODE if missing is None else value_name("missing", missing),
        )
        read = self._claims_of if missing is None else partial(self._episodes_of, missing)
        names = checks.names("tasks", tasks)
        wait = checks.seconds("timeout", timeout)
        uids = [uuid4().hex for _ in range(most)]

        made: Found = {}

        def work(scope: Scope, session: Session) -> Found:
            nonlocal made
            with tasks_locked(session, scope, names) as buffer:
                made = found = claims.claim(buffer, terms, uids)
            if not found:
                raise NotEnoughGroupsError(1, 0)
            return found

        try:
            while not (given := await read(await self._first(work, terms.missing, wait), seconds)):
                made = {}  # all were damaged, or deleted since
            return given
        except NotEnoughGroupsError:
            return []
        except BaseException:
            # The commit may have succeeded even if the call was cancelled.
            if made:
                release = partial(_release_all, made=made)
                await self._release_soon(f"claims {', '.join(made)}", seconds, release)
            raise

    async def append_turn(
        self, group_uid: str, position: int, turn: Turn, *, parent_uid: str | None = None
    ) -> None:
        """Append a turn to a trajectory that no process has claimed.

        It is durable when the call returns. The call can be repeated: a turn that is there already,
        by its `uid`, is not appended again.

        Args:
            group_uid: Uid of the group, which was opened with `open_group`.
            position: Position of the trajectory in the group, from 0.
            turn: The turn. It needs a `uid`. Its `parent`, if it has one, was appended before.
            parent_uid: Uid of a turn that was appended before, perhaps by another process, and that
                this one continues. The context of `turn` is then only what comes after all tokens
                of that turn, and so are its token extras, which are zeros before.

        Raises:
            TrajectoryClaimedError: Another process has claimed the trajectory.
            DuplicateTurnError: The group has another turn with this uid.
            UnknownTurnError: The parent is not a turn of this trajectory.
            UnknownGroupError: The group does not exist.
            DuplicateEpisodeError: The position has an episode already.
            GroupClosedError: The group accepts no more turns.
            InvalidInputError: An argument is invalid.
        """
        checks.name("group_uid", group_uid)
        at = checks.whole_number("position", position, most=checks.INT32[1])
        await self._append(group_uid, at, turn, parent_uid, None)

    async def finish_episode(
        self,
        group_uid: str,
        position: int,
        *,
        reward: float | None = None,
        advantage: float | None = None,
        finish_reason: str | None = None,
        extras: Mapping[str, ArrayLike] | None = None,
        metadata: Mapping[str, Any] | None = None,
        text: str | None = None,
        discarded: Iterable[str] = (),
        tags: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> GroupStatus:
        """Finish a trajectory: its turns become an episode of the group.

        The group is completed when each of its positions has an episode or is unusable, if it has
        at least `min_episodes` episodes. Otherwise it fails.

        Args:
            group_uid: Uid of the group.
            position: Position of the trajectory in the group, from 0.
            reward: Reward of the episode. Default: the sum of the rewards of its turns.
            advantage: As for `Episode`.
            finish_reason: As for `Episode`.
            extras: As for `Episode`.
            metadata: As for `Episode`.
            text: As for `Episode`.
            discarded: Uids of turns that are kept, but not trained on, nor are the turns that
                follow them: the branch of a retry that lost.
            tags: As for `add_episode`.
            timeout: Seconds to wait for capacity that leased groups use. None (default) waits
                indefinitely.

        Returns:
            Status of the group now: see `add_episode`; or `failed`.

        Raises:
            TrajectoryClaimedError: Another process has claimed the trajectory.
            UnknownTurnError: One of `discarded` is not a turn of the trajectory.
            UnknownGroupError: The group does not exist.
            DuplicateEpisodeError: The position has an episode already. It was kept.
            GroupClosedError: The group accepts no more episodes.
            BufferFullError: No capacity could be freed until `timeout`.
            InvalidInputError: An argument is invalid, the trajectory has no turns, or one was
                appended meanwhile.
        """
        return await self._finish(
            checks.name("group_uid", group_uid),
            checks.whole_number("position", position, most=checks.INT32[1]),
            discarded,
            tags,
            timeout,
            None,
            reward=reward,
            advantage=advantage,
            finish_reason=finish_reason,
            extras=extras,
            metadata=metadata,
            text=text,
        )

    async def fail_episode(
        self, group_uid: str, position: int, reason: str, *, timeout: float | None = None
    ) -> GroupStatus:
        """Mark a trajectory as unusable, for example because its sandbox died.

        Its turns are kept. The position gets no episode, so it is in no batch and no baseline.

        Args:
            group_uid: Uid of the group.
            position: Position of the trajectory in the group, from 0.
            reason: Why it cannot be used, as text.
            timeout: As for `finish_episode`.

        Returns:
            Status of the group now, as from `finish_episode`.

        Raises:
            TrajectoryClaimedError: Another process has claimed the trajectory.
            UnknownGroupError: The group does not exist.
            DuplicateEpisodeError: The position has an episode.
            GroupClosedError: The group accepts no more episodes.
            InvalidInputError: An argument is invalid.
        """
        checks.name("group_uid", group_uid)
        return await self._fail(
            group_uid,
            checks.whole_number("position", position, most=checks.INT32[1]),
            reason,
            timeout,
            claim_uid=None,
        )

    async def turns(self, group_uid: str, position: int) -> list[Turn]:
        """Return the turns of a trajectory that is not finished, in the order of their appends.

        Args:
            group_uid: Uid of the group.
            position: Position of the trajectory in the group, from 0.

        Raises:
            UnknownGroupError: The group does not exist.
            DuplicateEpisodeError: The trajectory is finished: `get` returns its episode.
            PayloadGoneError: The turns were dropped when the group was archived.
            CorruptPayloadError: The stored bytes of a turn are damaged.
            InvalidInputError: An argument is invalid.
        """
        uid = checks.name("group_uid", group_uid)
        at = checks.whole_number("position", position, most=checks.INT32[1])
        return list(await self._read_turns(uid, at, end_in(BULK_SECONDS)))

    async def trajectories(
        self,
        *,
        tasks: str | Iterable[str] | None = None,
        uids: str | Iterable[str] | None = None,
        limit: int = 1000,
    ) -> list[TrajectoryInfo]:
        """Return the positions of incremental groups that have no episode, oldest groups first.

        Args:
            tasks: Name or names of the tasks. Default: all tasks.
            uids: Uid or uids of groups. Default: all pending groups.
            limit: Largest number of positions.

        Raises:
            InvalidInputError: An argument is invalid.
        """
        names, groups = checks.names("tasks", tasks), checks.optional(checks.uids, "uids", uids)
        most = checks.whole_number("limit", limit)

        def work(session: Session) -> list[TrajectoryInfo]:
            return unfinished.listed(session, self.id, names, groups, most)

        return await self._read(work)

    async def release_claim(self, claim_uid: str, *, reason: str) -> None:
        """End a claim, whichever process has it. This counts as an attempt.

        Args:
            claim_uid: Uid of the claim, from `Claim.uid` or `trajectories`.
            reason: Why, as text.

        Raises:
            ClaimExpiredError: The claim has ended.
            InvalidInputError: An argument is invalid.
        """
        uid, why = checks.name("claim_uid", claim_uid), checks.string("reason", reason)
        await self._release_claim(uid, why, attempts=1)

    async def drain(self) -> None:
        """Wait until all running puts and appends have finished."""
        await super().drain()
        await self._appends.drain()

    async def _abort_puts(self) -> None:
        await super()._abort_puts()
        await self._appends.give_up()

    async def _first(self, work: Work[Found], missing: str, timeout: float | None) -> Found:
        """Claim what is missing as soon as there is some."""

        async def explain(_: ReplayDBError) -> None:
            # What was due was rolled back with the attempt.
            end = end_in(allowance())
            if await self._database.read(self._is_maintenance_due, end=end):
                await self._run_due_maintenance(end)

        async def may_claim(end: float | None) -> bool:
            may = partial(claims.may_claim, buffer_id=self.id, missing=missing)
            return await self._read(may, end, single=True)

        async with self._waiter(timeout, explain) as waiter:
            while True:
                try:
                    return await self._write(work, waiter.end)
                except NotEnoughGroupsError as error:
                    await waiter.wait(error, may_claim)

    async def _claims_of(self, found: Found, ttl: float) -> list[Claim]:
        """Read what was claimed: the rows of the trajectories of each claim, by its uid."""
        places = {(row.group_id, row.position) for rows in found.values() for row in rows}
        end = end_in(BULK_SECONDS)
        stored = await self._database.read(
            lambda session: unfinished.fetch(session, self.id, places), end=end
        )
        several = await self._decoded_turns(stored, end)
        made = []
        for uid, rows in found.items():
            decoded = several.get(rows[0].group_id)
            if decoded is None:  # it was deleted since
                continue
            sound = []
            for row in rows:
                if (damage := _damage(decoded, row.position)) is None:
                    sound.append(row.position)
                    continue
                # Otherwise each claim would get it again, and no other trajectory.
                logger.warning(
                    "buffer %r: position %d of group %r is unusable, because its turns are "
                    "damaged: %s",
                    self.name,
                    row.position,
                    row.group_uid,
                    damage,
                )
                reason = f"its turns are damaged: {damage}"
                await self._fail(row.group_uid, row.position, reason, 0, claim_uid=uid)
            if sound and isinstance(decoded, Unfinished):
                turns = {position: decoded.turns.get(position, ()) for position in sound}
                made.append(Claim(self, uid, ttl, decoded.group, turns))
        return made

    async def _episodes_of(self, missing: str, found: Found, ttl: float) -> list[Claim]:
        """Read the groups whose episodes were claimed: their rows by the uid of each claim."""
        ids = sorted({row.group_id for rows in found.values() for row in rows})
        damaged: Sequence[int] = ()
        try:
            groups: Iterable[StoredGroup] = await self.get(ids)
        except (CorruptPayloadError, PayloadGoneError) as error:
            groups, damaged = error.batch or (), error.group_ids
        except UnknownGroupError as error:
            groups = error.batch or ()  # the others were deleted since
        read = {group.id: group for group in groups}
        made = []
        for uid, rows in found.items():
            if group := read.get(rows[0].group_id):
                turns: dict[int, tuple[Turn, ...]] = {row.position: () for row in rows}
                made.append(Claim(self, uid, ttl, group, turns, missing))
            elif rows[0].group_id in damaged:
                reason = "the group is damaged"
                with suppress(ClaimExpiredError):  # then the next claim of it ends in the same way
                    await self._release_claim(uid, reason, attempts=1, is_last=True)
        return made

    async def _decoded_turns(
        self, stored: Stored, end: float
    ) -> dict[int, Unfinished | CorruptPayloadError]:
        whole = await self._payloads.read(stored, end)
        return await asyncio.to_thread(unfinished_of, whole)

    async def _read_turns(self, group_uid: str, position: int, end: float) -> tuple[Turn, ...]:
        """Read the turns of a trajectory.

        Raises:
            CorruptPayloadError: They are damaged.
        """

        def read(session: Session) -> Stored:
            return unfinished.fetch_one(session, self.id, group_uid, position)

        [(group_id, found)] = (await self._decoded_turns(await self._read(read, end), end)).items()
        if isinstance(found, CorruptPayloadError):
            raise found
        if (damage := found.damaged.get(position)) is not None:
            raise CorruptPayloadError(f"turns at position {position}: {damage}", [group_id])
        return found.turns.get(position, ())

    async def _append(
        self,
        group_uid: str,
        position: int,
        turn: Turn,
        parent_uid: str | None,
        claim_uid: str | None,
    ) -> None:
        checks.instance("turn", turn, Turn)
        if turn.uid is None:
            expected = "a uid, by which a repeated call finds the turn"
            raise InvalidInputError("turn.uid", expected, None)
        row = self._row
        if row.write_format < codec.VERSION:
            raise InvalidInputError(
                "turn",
                "a store that writes payload format 2 (see `replaydb db write-format 2`)",
                f"one that writes format {row.write_format}",
            )
        parent = None
        if parent_uid is not None:
            uid = checks.name("parent_uid", parent_uid)
            if turn.parent is not None:
                raise InvalidInputError("parent_uid", "None for a turn with a parent", repr(uid))
            parent = await self._parent(group_uid, position, uid, claim_uid)
        encode = partial(to_turn_record, turn, row.settings.compression, parent)
        is_large = turn.segment.length - turn.segment.shared > ENCODE_INLINE_TOKENS
        record = await asyncio.to_thread(encode) if is_large else encode()
        size = len(record.payload.data)
        self._check_size("turn", size)
        one = Append(group_uid, position, claim_uid, *record)
        outcome = await self._appends.submit(Submission(one, (), size))
        if not outcome.is_new:
            await self._check_same(group_uid, position, turn, record.payload.data, outcome)

    async def _parent(
        self, group_uid: str, position: int, uid: str, claim_uid: str | None
    ) -> Parent:
        """Find a turn that another one follows."""

        def read(session: Session) -> Parent | None:
            return unfinished.find_turn(session, self.id, group_uid, position, uid)

        found = await self._read(read)
        if found is None:
            await self._check_open(group_uid, position, claim_uid)
            raise UnknownTurnError(group_uid, position, uid)
        return found

    async def _check_open(self, group_uid: str, position: int, claim_uid: str | None) -> None:
        """Raise the error of a trajectory that is not open to the caller.

        Turns that are missing may be those of a group that was replaced or deleted meanwhile.
        """

        def read(session: Session) -> None:
            unfinished.check_open(session, self.id, group_uid, position, claim_uid)

        await self._read(read)

    async def _check_same(
        self, group_uid: str, position: int, turn: Turn, data: Any, outcome: Appended
    ) -> None:
        """Check that a turn that was there before is the given one.

        Raises:
            DuplicateTurnError: It is another one.
            DuplicateEpisodeError: The trajectory was finished meanwhile.
            UnknownGroupError: The group was deleted meanwhile.
        """

        def read(session: Session) -> Any:
            return unfinished.data_of(session, self.id, group_uid, position, outcome.turn)

        stored = await self._read(read)
        if stored is None or not codec.same_content(stored, data):
            raise DuplicateTurnError(group_uid, position, str(turn.uid))

    async def _finish(
        self,
        group_uid: str,
        position: int,
        discarded: Iterable[str],
        tags: Mapping[str, Any] | None,
        timeout: float | None,
        claim_uid: str | None,
        **values: Any,
    ) -> GroupStatus:
        names, new_tags = checks.uids("discarded", discarded), checks.json_object("tags", tags)
        wait = checks.seconds("timeout", timeout)
        Episode(prompt_ids=[], response_ids=[], **values)  # checks them before anything is read
        turns = await self._read_turns(group_uid, position, end_in(BULK_SECONDS))
        unknown = sorted(set(names) - {turn.uid for turn in turns})
        if unknown or not turns:
            await self._check_open(group_uid, position, claim_uid)
        if not turns:
            raise InvalidInputError(
                "position", "one with turns; `add_episode` adds a whole episode", position
            )
        if unknown:
            raise UnknownTurnError(group_uid, position, unknown[0])
        for turn in turns:
            if turn.uid in names:
                object.__setattr__(turn, "is_discarded", True)
        episode = Episode(turns=turns, **values)
        trained = zip(turns, episode.forest.is_trained, strict=True)
        return await self._add(
            group_uid,
            episode,
            position,
            wait,
            tags=new_tags,
            claim_uid=claim_uid,
            num_turns=len(turns),
            discarded=[turn.uid for turn, is_trained in trained if not is_trained],
        )

    async def _fail(
        self,
        group_uid: str,
        position: int,
        reason: str,
        timeout: float | None,
        *,
        claim_uid: str | None,
    ) -> GroupStatus:
        why, wait = checks.string("reason", reason), checks.seconds("timeout", timeout)
        return await self._end(Addition(group_uid, position, None, why, claim_uid), 0, wait)

    def _extend_claim(self, claim_uid: str, seconds: float) -> Awaitable[None]:
        """Let a claim expire this many seconds from now."""

        def work(_: Scope, session: Session) -> None:
            claims.extend(session, claim_uid, seconds)

        return self._write(work, announces=False)

    async def _release_claim(
        self, claim_uid: str, reason: str | None, *, attempts: int, is_last: bool = False
    ) -> None:
        def work(scope: Scope, session: Session) -> None:
            names = claims.task_names(session, self.id, claim_uid)
            if not names:
                raise ClaimExpiredError(claim_uid)
            with tasks_locked(session, scope, names) as buffer:
                claims.release(buffer, claim_uid, reason, attempts=attempts, is_last=is_last)

        await self._write(work)


def _damage(found: Unfinished | CorruptPayloadError, position: int) -> str | None:
    """Return why a trajectory cannot be read, or None."""
    return found.reason if isinstance(found, CorruptPayloadError) else found.damaged.get(position)


def _release_all(scope: Scope, session: Session, *, made: Found) -> None:
    """Release claims that never reached the caller. They do not count as attempts."""
    names = {row.task_name for rows in made.values() for row in rows}
    # `claim` holds the same locks until it ends. If its commit is still on its way to the server,
    # this waits for it instead of finding no claim.
    with tasks_locked(session, scope, names) as buffer:
        for uid in made:
            with suppress(ClaimExpiredError):
                claims.release(buffer, uid, None, attempts=0)
