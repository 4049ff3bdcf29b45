"""Everything that a store says of itself, compared with what there is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from sqlalchemy import Connection

from replaydb import checks, codec
from replaydb.database.prepared import execute
from replaydb.database.repository import buffers, packs, recount, rows, sequences, tags
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.rows import Values
from replaydb.database.repository.sequences import Behind
from replaydb.database.schema import episode, episode_group, payload
from replaydb.database.statements.recount import (
    orphans,
    select_groups_of_stray_texts,
    select_miscounted_groups,
    select_misheld_groups,
)
from replaydb.database.statements.rows import columns
from replaydb.database.transactions import BULK_SECONDS, end_in
from replaydb.errors import CorruptPayloadError, NotSupportedError
from replaydb.operations.intact import intact_groups, restore
from replaydb.operations.reading import Data, Part, every_payload
from replaydb.store import Store

#: Problems that are told one by one; the others are only counted.
MOST_TOLD: Final = 1000

_INTACT: Final = "it failed because it was damaged, but is intact now; it was "

Kind = Literal["damage", "payload", "group", "orphan", "account", "pack", "sequence", "failed"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong.

    Attributes:
        kind: `damage`: the engine finds its file damaged, or a value that its column can not have.
            `payload`: its bytes are not what was stored, or hold other episodes than rows tell of.
            `group`: what its row says is not what its episodes, payloads, texts, lease and indexed
            tags come to. `orphan`: rows whose parents are gone.
            `account`: that of a task, which capacity and draws go by. `pack`: that of a pack.
            `sequence`: it would generate ids that rows of its table have.
            `failed`: a group that failed because it was damaged, but is intact.
        where: Of which group, task, table, row or pack.
        what: What is wrong there.
        is_repaired: Whether it was, by this call.
    """

    kind: Kind
    where: str
    what: str
    is_repaired: bool = False


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` has found.

    Attributes:
        num_groups: Groups that there were when it began.
        num_payloads: Parts of payloads that were read.
        total_payloads: Those that there were when it began.
        num_bytes: Bytes that were read.
        num_problems: Everything that is wrong.
        num_repaired: What of that was repaired.
        problems: The first 1,000 of them.
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
        """Whether nothing is wrong, or nothing any more."""
        return self.num_problems == self.num_repaired


async def verify(
    store: Store,
    *,
    repair: bool = False,
    progress: Callable[[VerifyReport], object] | None = None,
) -> VerifyReport:
    """Compare everything that a store says of itself with what there is.

    Accounts, references and scalars are compared in one snapshot, unless the engine finds damage:
    by what is damaged nothing else is judged. Then every payload, inside and outside the database,
    is read and compared with its checksum and the rows of its episodes, 16 MB at a time. It may run
    beside everything else.

    Args:
        store: The store; read-only will do, unless it is to be repaired.
        repair: Correct accounts of tasks and packs, under their locks, if nothing is wrong with the
            rows that they follow from, and move sequences past the ids that rows have. Give intact
            groups that failed because they were damaged the status that they had. What else is
            wrong is lost data: delete those groups, or restore a backup.
        progress: Called with what was found so far, again and again.

    Raises:
        PayloadsUnavailableError: The place outside cannot be reached, or is not that of the store.
        DatabaseReadOnlyError: It is to be repaired, but was opened to be read.
        DatabaseError: The database cannot be read or written.
    """
    verifying = _Verifying(store, checks.optional(checks.function, "progress", progress))
    await verifying.rows(repair=checks.flag("repair", repair))
    await verifying.payloads()
    await verifying.failed(repair=repair)
    return verifying.report


class _Verifying:
    def __init__(self, store: Store, progress: Callable[[VerifyReport], object] | None) -> None:
        self.report = VerifyReport()
        self._database = store._database
        self._payloads = store._payloads
        self._progress = progress

    async def rows(self, *, repair: bool) -> None:
        """What the engine can compare."""
        async with self._database.snapshot(end_in(BULK_SECONDS)) as snapshot:
            groups, parts = await snapshot.read(_totals)
            self._did(num_groups=groups, total_payloads=parts)
            damage = await snapshot.read(self._database.backend.damage)
            self._tell(Problem("damage", where, what) for where, what in damage)
            if damage:
                return
            self._tell(await snapshot.read(_orphans))
            self._tell(await snapshot.read(_wrong_groups))
            self._tell(await snapshot.read(_mistagged_groups))
            accounts = await snapshot.read(_accounts)
            wrong_packs = await snapshot.read(_packs)
            behind = await snapshot.read(self._behind)
        if repair and behind:
            await self._database.write(self._advance, end=end_in(BULK_SECONDS))
        repaired = [
            Problem("sequence", f"table {one.table}", str(one), is_repaired=repair)
            for one in behind
        ]
        repair = repair and not self.report.num_problems
        if repair and (accounts or wrong_packs):
            await self._database.write(self._repair, end=end_in(BULK_SECONDS))
        for problems in (accounts, wrong_packs):
            self._tell(replace(one, is_repaired=repair) for one in problems)
        self._tell(repaired)

    def _behind(self, connection: Connection) -> list[Behind]:
        return sequences.behind(self._database.backend, connection)

    def _advance(self, connection: Connection) -> None:
        sequences.repair(self._database.backend, connection)

    def _repair(self, connection: Connection) -> None:
        for row in _every_buffer(connection):
            recount.repair_accounts(connection, row.id, row.name)
        packs.recount(connection, self._database.backend.now(connection))

    async def payloads(self) -> None:
        """What has to be read."""
        async for fetched in every_payload(self._database, self._payloads):
            size = sum(len(data) for _, data in fetched.sound)
            number = len(fetched.sound) + len(fetched.damaged)
            self._tell(
                Problem("payload", f"group {group_id}, part {part}", why)
                for (group_id, part), why in sorted(fetched.damaged.items())
            )
            self._tell(await self._contradicting(fetched.sound))
            self._did(num_payloads=number, num_bytes=size)

    async def failed(self, *, repair: bool) -> None:
        """Groups that failed because they were damaged, and are intact."""
        if any(one.kind == "damage" for one in self.report.problems):
            return
        async for buffer, statuses in intact_groups(self._database, self._payloads):
            if repair:
                await restore(self._database, buffer, list(statuses))
            self._tell(
                Problem("failed", f"group {one}", f"{_INTACT}{status}", is_repaired=repair)
                for one, status in statuses.items()
            )

    async def _contradicting(self, sound: Sequence[tuple[Part, Data]]) -> list[Problem]:
        """Payloads that hold other episodes than their rows tell of."""
        if not sound:
            return []
        ids = [part.group_id for part, _ in sound]
        after, last = min(ids) - 1, max(ids)

        def said(connection: Connection) -> tuple[list[Values], list[Values]]:
            parts = rows.children(connection, payload, after, last)
            return parts, rows.children(connection, episode, after, last)

        parts, episodes = await self._database.read(said)
        return await asyncio.to_thread(_contradictions, sound, parts, episodes)

    def _tell(self, problems: Iterable[Problem]) -> None:
        found = tuple(problems)
        told = (*self.report.problems, *found)[:MOST_TOLD]
        self.report = replace(self.report, problems=told)
        repaired = sum(one.is_repaired for one in found)
        self._did(num_problems=len(found), num_repaired=repaired)

    def _did(self, **more: int) -> None:
        counted = {name: getattr(self.report, name) + number for name, number in more.items()}
        self.report = replace(self.report, **counted)
        if self._progress is not None:
            self._progress(self.report)


def _totals(connection: Connection) -> tuple[int, int]:
    return rows.count(connection, episode_group), rows.count(connection, payload)


def _orphans(connection: Connection) -> list[Problem]:
    found = []
    for table, parent, statement in orphans():
        [(number,)] = execute(connection, statement)
        if number:
            what = f"{number} rows refer to rows of {parent} that are gone"
            found.append(Problem("orphan", f"table {table}", what))
    return found


def _wrong_groups(connection: Connection) -> list[Problem]:
    found = []
    for statement, what in (
        (
            select_misheld_groups(MOST_TOLD),
            "it is leased without a lease, or the other way round",
        ),
        (select_groups_of_stray_texts(MOST_TOLD), "it has a text of an episode that it has not"),
    ):
        rows_found = execute(connection, statement)
        found += [Problem("group", f"group {group_id}", what) for (group_id,) in rows_found]
    for row in execute(connection, select_miscounted_groups(MOST_TOLD)):
        pairs = {
            "episodes": (row.num_episodes, row.episodes),
            "tokens": (row.num_tokens, row.tokens),
            "bytes": (row.num_bytes, row.bytes),
            "texts": (row.has_transcript, row.has_text),
        }
        wrong = [f"{a} {name}, there are {b}" for name, (a, b) in pairs.items() if a != b]
        what = "; ".join(wrong) or "its payload is gone"
        found.append(Problem("group", f"group {row.id}", what))
    return found


def _mistagged_groups(connection: Connection) -> list[Problem]:
    return [
        Problem("group", f"group {group_id}", f"the index of its tag {tag!r} has something else")
        for row in _every_buffer(connection)
        for group_id, tag in tags.mistagged(connection, row, MOST_TOLD).items()
    ]


def _contradictions(
    sound: Sequence[tuple[Part, Data]], parts: Sequence[Values], episodes: Sequence[Values]
) -> list[Problem]:
    names = [one.name for one in columns(episode)]
    each = (dict(zip(names, row, strict=True)) for row in episodes)
    said = {(row["group_id"], row["position"]): (row["reward"], row["num_tokens"]) for row in each}
    checksums = {part[:2]: part.checksum for part in (Part(*row) for row in parts)}
    found = []
    for part, data in sound:
        if checksums.get(part[:2]) != part.checksum:
            continue  # it has been replaced meanwhile
        where = f"group {part.group_id}, part {part.part}"
        try:
            flat = codec.decode(data)
        except CorruptPayloadError as error:
            found.append(Problem("payload", where, error.reason))
            continue
        except NotSupportedError:
            continue  # it is compressed, and nobody here can tell what it holds
        rewards = (None if one != one else one for one in flat.rewards.tolist())
        held = list(zip(rewards, flat.lengths.tolist(), strict=True))
        if held != [said.get((part.group_id, part.part + i)) for i in range(len(held))]:
            what = "its rows tell of other episodes: rewards, tokens or positions differ"
            found.append(Problem("payload", where, what))
    return found


def _every_buffer(connection: Connection) -> list[BufferRow]:
    found = (buffers.find(connection, name) for name in buffers.buffer_names(connection))
    return [row for row in found if row is not None]


def _accounts(connection: Connection) -> list[Problem]:
    found = []
    for row in _every_buffer(connection):
        for task_name, wrong in recount.wrong_accounts(connection, row.id).items():
            what = "; ".join(f"{each} is {a}, should be {b}" for each, (a, b) in wrong.items())
            found.append(Problem("account", f"task {task_name!r} of buffer {row.name!r}", what))
    return found


def _packs(connection: Connection) -> list[Problem]:
    found = []
    for row in packs.miscounted(connection):
        if (row.live_parts, row.live_bytes) != (row.parts, row.bytes):
            what = f"{row.live_parts} parts of {row.live_bytes} bytes, {row.parts} of {row.bytes}"
            what += " refer to it"
        elif row.parts:
            what = f"marked for deletion, but {row.parts} parts refer to it"
        else:
            what = "no parts refer to it, but it is not marked for deletion"
        found.append(Problem("pack", f"pack {row.name}", what))
    return found
