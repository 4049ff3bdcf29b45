"""Integrity check of a store (`replaydb verify`): rows, counters, sequences and payloads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

from sqlalchemy import Select, and_, exists, func, select

from replaydb import codec
from replaydb.buffer.store import Store
from replaydb.database.repository import aging, packs, recount, row_differences, sequences, tags
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.row_differences import Values
from replaydb.database.repository.trajectories import EPISODE
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import BULK_SECONDS, allowance, end_in
from replaydb.database.statements.table_ranges import columns
from replaydb.database.tables.expressions import total_or_zero
from replaydb.database.tables.schema import (
    IS_OF_TURN,
    LATE_PART,
    episode,
    episode_group,
    group,
    lease,
    metadata,
    payload,
    trajectory,
    transcript,
)
from replaydb.domain import checks
from replaydb.domain.episodes import Episode, GroupStatus, Turn
from replaydb.errors import CorruptPayloadError, NotSupportedError
from replaydb.operations.reading import Data, Part, every_payload
from replaydb.operations.recovery import (
    every_buffer,
    intact_groups,
    rebuild_columns,
    rebuild_staleness,
    rebuild_tags,
    restore,
)

#: Maximum number of problems that are listed; further ones are only counted.
MOST_LISTED: Final = 1000

_INTACT: Final = "marked failed because of damage, but is intact now; former status: "

Kind = Literal[
    "damage", "payload", "group", "orphan", "tags", "columns", "staleness", "counters", "pack",
    "sequence", "failed",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that `verify` found.

    Attributes:
        kind: `damage`: the engine reports a damaged file, or a value is invalid for its column.
            `payload`: the bytes differ from their checksum, or contradict the rows of the episodes.
            `group`: the row of a group contradicts its episodes, payloads, texts or lease.
            `orphan`: rows refer to missing rows. `tags`: the index of a tag, which filters rely
            on, differs from the groups. `columns`: columns of a group that follow from its episodes
            or its priority (rewards, policy versions, weight) are wrong. `staleness`: the stored
            staleness of groups of a task, which filters rely on, differs from the policy version,
            or groups should have expired. `counters`: the counters of a task, which capacity and
            draws rely on, are wrong. `pack`: the counters of a pack are wrong, or it is wrongly
            marked for deletion or not marked. `sequence`: it would generate ids of existing rows.
            `failed`: a group was marked failed because of damage, but is intact now.
        where: The group, task, table, row or pack.
        what: Description of the problem.
        is_repaired: Whether this call repaired it.
    """

    kind: Kind
    where: str
    what: str
    is_repaired: bool = False


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Progress or result of `verify`.

    Attributes:
        num_groups: Number of groups when the check began.
        num_payloads: Number of parts of payloads read.
        total_payloads: Number of parts of payloads when the check began.
        num_bytes: Bytes of payloads read.
        num_problems: Number of problems found.
        num_repaired: Number of problems repaired.
        problems: The first 1,000 problems.
    """

    num_groups: int = 0
    num_payloads: int = 0
    total_payloads: int = 0
    num_bytes: int = 0
    num_problems: int = 0
    num_repaired: int = 0
    problems: tuple[Problem, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether no problem was found, or all of them were repaired."""
        return self.num_problems == self.num_repaired


#: Wrong tag indexes, or tasks: the buffer, the name, and the problem.
Wrong = list[tuple[BufferRow, str, Problem]]


async def verify(
    store: Store,
    *,
    repair: bool = False,
    progress: Callable[[VerifyReport], object] | None = None,
) -> VerifyReport:
    """Check the integrity of a store, and optionally rebuild what is derived from other data.

    Counters, references and scalars are checked in one snapshot. If the engine reports damage,
    these checks are skipped, since damaged rows prove nothing. Then every payload, inside or
    outside the database, is read, up to 16 MB at a time, and compared with its checksum and the
    rows of its episodes. Other processes can use the store meanwhile.

    Args:
        store: The store. It may be opened read-only unless `repair` is set.
        repair: Rebuild wrong tag indexes and columns, and update the staleness of groups, in short
            transactions. Recompute the counters of tasks and packs, under their locks, if the rows
            that they are computed from have no problems. Move id sequences past the ids of existing
            rows. Restore the former status of groups that failed as damaged but are intact. Other
            problems are lost data: delete the affected groups, or restore a backup.
        progress: Called repeatedly with the report so far.

    Returns:
        All problems found.

    Raises:
        PayloadsUnavailableError: The payload store cannot be reached, or its marker is missing,
            damaged, or that of another store.
        DatabaseReadOnlyError: `repair` is set, but the store was opened read-only.
        DatabaseError: The database cannot be read or written.
    """
    verifying = _Verifying(store, checks.optional(checks.function, "progress", progress))
    await verifying.rows(repair=checks.flag("repair", repair))
    await verifying.payloads(repair=repair)
    await verifying.staleness(repair=repair)
    await verifying.failed(repair=repair)
    return verifying.report


class _Verifying:
    def __init__(self, store: Store, progress: Callable[[VerifyReport], object] | None) -> None:
        self.report = VerifyReport()
        self._payloads = store._payloads
        self._database = self._payloads.database
        self._progress = progress
        self._lost: set[str] = set()  # groups whose data is wrong or was lost

    async def rows(self, *, repair: bool) -> None:
        """Check rows, counters and sequences by SQL, in one snapshot."""
        backend = self._database.backend
        async with self._database.snapshot(end_in(BULK_SECONDS)) as snapshot:
            groups, parts = await snapshot.read(_totals)
            self._update(num_groups=groups, total_payloads=parts)
            damage = await snapshot.read(backend.administration.damage)
            self._add_problems(Problem("damage", where, what) for where, what in damage)
            if damage:
                return
            self._add_problems(await snapshot.read(_orphans))
            self._add_problems(await snapshot.read(_wrong_groups))
            wrong_tags = await snapshot.read(_wrong_tags)
            task_states = await snapshot.read(_task_states)
            wrong_packs = await snapshot.read(_packs)
            behind = await snapshot.read(partial(sequences.behind, backend))
        if repair and behind:
            await self._database.write(partial(sequences.repair, backend), end=end_in(BULK_SECONDS))
        # These follow from columns that nothing can be checked against, so other problems do not
        # matter.
        repaired = [
            Problem("sequence", f"table {one.table}", str(one), is_repaired=repair)
            for one in behind
        ]
        for row, name, problem in wrong_tags:
            if repair:
                await rebuild_tags(self._database, row, name)
            repaired.append(replace(problem, is_repaired=repair))
        repair = repair and not self.report.num_problems
        if repair and (task_states or wrong_packs):
            await self._database.write(self._repair, end=end_in(BULK_SECONDS))
        for problems in (task_states, wrong_packs):
            self._add_problems(replace(one, is_repaired=repair) for one in problems)
        self._add_problems(repaired)

    def _repair(self, session: Session) -> None:
        for row in every_buffer(session):
            recount.repair_counters(session, row.id, row.name)
        packs.recount(session, session.now())

    async def payloads(self, *, repair: bool) -> None:
        """Read all payloads, check them against checksums and rows, and then columns of groups."""
        await self._payloads.check(end_in(allowance()))
        buffer_rows: dict[int, BufferRow] = {}
        if not any(one.kind == "damage" for one in self.report.problems):
            buffer_rows = {row.id: row for row in await self._database.read(every_buffer)}
        async for fetched in every_payload(self._payloads):
            size = sum(len(data) for _, data in fetched.sound)
            number = len(fetched.sound) + len(fetched.damaged)
            self._add_problems(
                Problem("payload", f"group {group_id}, part {part}", why)
                for (group_id, part), why in sorted(fetched.damaged.items())
            )
            self._add_problems(await self._contradicting(fetched.sound))
            ids = sorted({part.group_id for part, _ in fetched.sound})
            await self._columns(buffer_rows, ids, repair=repair)
            self._update(num_payloads=number, num_bytes=size)

    async def _columns(
        self, buffer_rows: Mapping[int, BufferRow], ids: Sequence[int], *, repair: bool
    ) -> None:
        """Check columns that follow from episodes, of groups without other problems."""
        if not buffer_rows:
            return
        sound = [one for one in ids if f"group {one}" not in self._lost]

        def work(session: Session) -> dict[Any, recount.Wrong]:
            return recount.wrong_columns(session, buffer_rows, sound)

        found = await self._database.read(work)
        for buffer_id in {row.buffer_id for row in found} if repair else ():
            mine = [row.id for row in found if row.buffer_id == buffer_id]
            await rebuild_columns(self._database, buffer_rows[buffer_id], mine)
        self._add_problems(
            Problem("columns", f"group {row.id}", _described(wrong), is_repaired=repair)
            for row, wrong in found.items()
        )

    async def staleness(self, *, repair: bool) -> None:
        """Check the staleness of groups, after the versions that it follows from."""
        if any(one.kind == "damage" for one in self.report.problems):
            return
        outdated = await self._database.read(_outdated, end=end_in(BULK_SECONDS))
        for row, name, problem in outdated:
            if repair:
                await rebuild_staleness(self._database, row, name)
            self._add_problems([replace(problem, is_repaired=repair)])

    async def failed(self, *, repair: bool) -> None:
        """Find groups that failed as damaged but are intact, and optionally restore them."""
        if any(one.kind == "damage" for one in self.report.problems):
            return
        async for buffer, statuses in intact_groups(self._payloads):
            if repair:
                await restore(self._database, buffer, list(statuses))
            self._add_problems(
                Problem("failed", f"group {one}", f"{_INTACT}{status}", is_repaired=repair)
                for one, status in statuses.items()
            )

    async def _contradicting(self, sound: Sequence[tuple[Part, Data]]) -> list[Problem]:
        """Return problems of payloads whose episodes differ from their rows."""
        if not sound:
            return []
        ids = [part.group_id for part, _ in sound]
        after, last = min(ids) - 1, max(ids)

        def recorded(session: Session) -> tuple[list[Values], list[Values]]:
            parts = row_differences.children(session, payload, after, last)
            return parts, row_differences.children(session, episode, after, last)

        parts, episodes = await self._database.read(recorded)
        return await asyncio.to_thread(_contradictions, sound, parts, episodes)

    def _add_problems(self, problems: Iterable[Problem]) -> None:
        found = tuple(problems)
        lost = (one for one in found if one.kind in ("group", "payload"))
        self._lost |= {one.where.partition(",")[0] for one in lost}
        listed = (*self.report.problems, *found)[:MOST_LISTED]
        self.report = replace(self.report, problems=listed)
        repaired = sum(one.is_repaired for one in found)
        self._update(num_problems=len(found), num_repaired=repaired)

    def _update(self, **more: int) -> None:
        counted = {name: getattr(self.report, name) + number for name, number in more.items()}
        self.report = replace(self.report, **counted)
        if self._progress is not None:
            self._progress(self.report)


def _totals(session: Session) -> tuple[int, int]:
    return row_differences.count(session, episode_group), row_differences.count(session, payload)


def _orphans(session: Session) -> list[Problem]:
    found = []
    for table, parent, statement in orphans():
        [(number,)] = session.run(statement)
        if number:
            what = f"{number} rows refer to missing rows of {parent}"
            found.append(Problem("orphan", f"table {table}", what))
    return found


def _wrong_groups(session: Session) -> list[Problem]:
    found = []
    for statement, what in (
        (
            select_mismatched_leases(MOST_LISTED),
            "leased without a lease, or has a lease without being leased",
        ),
        (select_groups_of_stray_texts(MOST_LISTED), "has a text of an episode that does not exist"),
        (
            select_groups_of_wrong_trajectories(MOST_LISTED),
            "pending, and its episodes and trajectories are not as many as it expects; or open "
            "trajectories, and it is not pending",
        ),
    ):
        rows_found = session.run(statement)
        found += [Problem("group", f"group {group_id}", what) for (group_id,) in rows_found]
    for row in session.run(select_miscounted_groups(MOST_LISTED)):
        pairs = {
            "episodes": (row.num_episodes, row.episodes),
            "tokens": (row.num_tokens, row.tokens),
            "bytes": (row.num_bytes, row.bytes),
            "texts": (row.has_transcript, row.has_text),
        }
        wrong = [f"{name}: {a} recorded, {b} stored" for name, (a, b) in pairs.items() if a != b]
        what = "; ".join(wrong) or "its payload is missing"
        found.append(Problem("group", f"group {row.id}", what))
    return found


def _wrong_tags(session: Session) -> Wrong:
    found: Wrong = []
    for row in every_buffer(session):
        for name, number in tags.mistagged(session, row).items():
            where = f"index of tag {name!r} of buffer {row.name!r}"
            found.append((row, name, Problem("tags", where, f"{number} groups differ from it")))
    return found


def _outdated(session: Session) -> Wrong:
    found: Wrong = []
    for row in every_buffer(session):
        for name, what in aging.outdated(session, row).items():
            where = f"task {name!r} of buffer {row.name!r}"
            found.append((row, name, Problem("staleness", where, what)))
    return found


def _facts(one: Episode) -> list[tuple[float | None, int | None, int]]:
    """Return what may be recorded of an episode: now, and without the column `longest_row`."""
    rows, turns = one.row_lengths, sum(turn.length for turn in one.segments)
    return [(one.reward, longest, sum(rows)) for longest in (max(rows, default=0), None)] + [
        (one.reward, None, turns)
    ]


def _contradictions(
    sound: Sequence[tuple[Part, Data]], parts: Sequence[Values], episodes: Sequence[Values]
) -> list[Problem]:
    names = [one.name for one in columns(episode)]
    each = (dict(zip(names, row, strict=True)) for row in episodes)
    recorded = {
        (row["group_id"], row["position"]): (row["reward"], row["longest_row"], row["num_tokens"])
        for row in each
    }
    checksums = {part[:2]: part.checksum for part in (Part(*row) for row in parts)}
    # What was replaced after it was read is not compared.
    current = [one for one in sound if checksums.get(one[0][:2]) == one[0].checksum]
    heavy: dict[tuple[int, int | None], list[tuple[Part, Data]]] = {}
    for part, data in current:
        if part.field is not None:
            heavy.setdefault((part.group_id, part.of_part), []).append((part, data))
    numbers = {(row.group_id, row.part) for row in (Part(*row) for row in parts) if not row.field}
    found = [
        Problem("payload", f"group {group_id}, part {number}", "it has columns, and does not exist")
        for group_id, number in heavy
        if (group_id, number) not in numbers
    ]
    found += _broken_turns(current)
    late, broken = _late_values(current)
    found += broken
    for part, data in current:
        if part.field is not None or part.of_part is not None or part.part == LATE_PART:
            continue
        where = f"group {part.group_id}, part {part.part}"
        try:
            mine = [(part, data), *heavy.get(part[:2], ())]
            contents = codec.decode(
                [data for _, data in mine], [one.expanded_bytes for one, _ in mine]
            )
            episodes_of_part = dict(enumerate(contents.episodes, part.part))
            arrived = late.get(part.group_id, {})
            now = {at: arrived[at] for at in arrived if int(at) in episodes_of_part}
            codec.late.apply(now, episodes_of_part)
        except CorruptPayloadError as error:
            found.append(Problem("payload", where, error.reason))
            continue
        except NotSupportedError:
            continue  # compressed, and zstandard is not installed
        if any(
            recorded.get((part.group_id, part.part + i)) not in _facts(one)
            for i, one in enumerate(contents.episodes)
        ):
            what = "rewards, numbers of tokens or positions differ from the rows of its episodes"
            found.append(Problem("payload", where, what))
    return found


def _late_values(
    sound: Sequence[tuple[Part, Data]],
) -> tuple[dict[int, codec.late.Late], list[Problem]]:
    """Return values that arrived after the episodes, by group, and problems of others."""
    values, found = {}, []
    for part, data in sound:
        if part.part != LATE_PART:
            continue
        try:
            values[part.group_id] = codec.late.decode(data, codec.VERSION)
        except CorruptPayloadError as error:
            where = f"group {part.group_id}, late values"
            found.append(Problem("payload", where, error.reason))
    return values, found


def _broken_turns(sound: Sequence[tuple[Part, Data]]) -> list[Problem]:
    """Return problems of turns of unfinished trajectories."""
    found = []
    known: dict[int, dict[str, Turn]] = {}
    for part, data in sorted(sound, key=lambda one: one[0][:2]):
        if part.field is not None or part.of_part is None:
            continue
        mine = known.setdefault(part.group_id, {})
        try:
            turn = codec.decode_turn(data, part.expanded_bytes, mine)
        except CorruptPayloadError as error:
            where = f"group {part.group_id}, part {part.part}"
            found.append(Problem("payload", where, error.reason))
        except NotSupportedError:
            return []  # compressed, and zstandard is not installed
        else:
            mine[turn.uid or ""] = turn
    return found


def _task_states(session: Session) -> list[Problem]:
    found = []
    for row in every_buffer(session):
        for task_name, wrong in recount.wrong_counters(session, row.id).items():
            where = f"task {task_name!r} of buffer {row.name!r}"
            found.append(Problem("counters", where, _described(wrong)))
    return found


def _described(wrong: recount.Wrong) -> str:
    return "; ".join(f"{each} is {a}, expected {b}" for each, (a, b) in wrong.items())


def _packs(session: Session) -> list[Problem]:
    found = []
    for row in packs.miscounted(session):
        if (row.live_parts, row.live_bytes) != (row.parts, row.bytes):
            what = f"counts {row.live_parts} parts ({row.live_bytes} bytes), but {row.parts} parts"
            what += f" ({row.bytes} bytes) refer to it"
        elif row.parts:
            what = f"marked for deletion, but {row.parts} parts refer to it"
        else:
            what = "no parts refer to it, but it is not marked for deletion"
        found.append(Problem("pack", f"pack {row.name}", what))
    return found


def orphans() -> Iterator[tuple[str, str, Select[int]]]:
    """Yield, for every foreign key, the names of both tables and a count of rows without parent."""
    for table in metadata.sorted_tables:
        for key in sorted(table.foreign_key_constraints, key=lambda one: str(one.name)):
            parent = key.referred_table.alias()
            pairs = [(one.parent, parent.c[one.column.name]) for one in key.elements]
            known = and_(*(mine.is_not(None) for mine, _ in pairs))
            has_parent = exists().where(*(mine == theirs for mine, theirs in pairs))
            count = select(func.count()).select_from(table).where(known, ~has_parent)
            yield table.name, key.referred_table.name, count


def select_miscounted_groups(most: int) -> Select[Any]:
    """Select groups whose scalars differ from the totals of their episodes, payloads and texts."""
    episodes = select(
        episode.c.group_id,
        func.count().label("number"),
        total_or_zero(episode.c.num_tokens).label("size"),
    )
    length = func.coalesce(payload.c.pack_length, func.length(payload.c.data))
    parts = select(
        payload.c.group_id, func.count().label("number"), total_or_zero(length).label("size")
    ).where(~IS_OF_TURN)  # they are counted when their trajectory is finished
    members = episodes.group_by(episode.c.group_id).subquery()
    stored = parts.group_by(payload.c.group_id).subquery()
    texts = exists().where(transcript.c.group_id == group.id)
    found = (
        func.coalesce(members.c.number, 0).label("episodes"),
        func.coalesce(members.c.size, 0).label("tokens"),
        func.coalesce(stored.c.size, 0).label("bytes"),
        texts.label("has_text"),
    )
    recorded = (group.num_episodes, group.num_tokens, group.num_bytes, group.has_transcript)
    is_lost = (
        (group.group_status != GroupStatus.ARCHIVED.value)
        & (group.num_episodes > 0)
        & stored.c.number.is_(None)
    )
    wrong = is_lost
    for one, other in zip(recorded, found, strict=True):
        wrong |= one != other.element
    return (
        select(group.id, *recorded, *found)
        .select_from(episode_group)
        .outerjoin(members, members.c.group_id == group.id)
        .outerjoin(stored, stored.c.group_id == group.id)
        .where(wrong)
        .order_by(group.id)
        .limit(most)
    )


def select_mismatched_leases(most: int) -> Select[int]:
    """Select groups whose status, lease and `leased_from` contradict each other."""
    is_leased = group.group_status == GroupStatus.LEASED.value
    wrong = is_leased != group.lease_id.is_not(None)
    wrong |= is_leased != group.leased_from.is_not(None)
    wrong |= lease.c.buffer_id != group.buffer_id
    return (
        select(group.id)
        .outerjoin_from(episode_group, lease, lease.c.id == group.lease_id)
        .where(wrong)
        .order_by(group.id)
        .limit(most)
    )


def select_groups_of_stray_texts(most: int) -> Select[int]:
    """Select groups with texts of episodes that do not exist."""
    text = transcript.c
    mine = (episode.c.group_id == text.group_id) & (episode.c.position == text.position)
    stray = exists().where(text.group_id == group.id, ~exists().where(mine))
    return select(group.id).where(stray).order_by(group.id).limit(most)


def select_groups_of_wrong_trajectories(most: int) -> Select[int]:
    """Select groups with a position that is neither an episode nor a trajectory, or both.

    In addition, groups that are not pending and lack something that is still waited for, pending
    groups in which nothing is open, and groups with values of episodes that do not exist.
    """
    mine = trajectory.c.group_id == group.id
    is_of_episode = trajectory.c.missing == EPISODE
    number = select(func.count()).where(mine, is_of_episode).scalar_subquery()
    is_pending = group.group_status == GroupStatus.PENDING.value
    has_episode = exists().where(
        episode.c.group_id == trajectory.c.group_id,
        episode.c.position == trajectory.c.position,
    )
    is_open = exists().where(mine, trajectory.c.unusable_reason.is_(None))
    wrong = is_pending & (group.num_episodes + number != group.expected_episodes)
    wrong |= exists().where(mine, is_of_episode == has_episode)
    wrong |= is_pending != is_open
    return select(group.id).where(wrong).order_by(group.id).limit(most)
