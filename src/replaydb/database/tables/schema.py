"""Definitions of the tables, as the newest migration creates them.

`docs/architecture.md` explains the layout, and `migrations/` has the history. A test compares these
definitions with the migrated schema, column by column and index by index.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    false,
    literal_column,
    text,
)

from replaydb.database.tables.column_types import (
    AnyJson,
    GeneratedJson,
    GeneratedText,
    Id,
    Json,
    Name,
    Settings,
    Tags,
    UtcDateTime,
)
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.results import DrawOutcome

#: Every revision in `migrations/`, the newest last, with the first release that has it. Opening a
#: store compares with the last one, and so does not need alembic.
RELEASES = {f"{number:04}": "0.1.0" for number in range(1, 17)}
REVISIONS = tuple(RELEASES)
#: Revisions that a client must know to use the tables. All others are additive: see
#: `docs/migrations.md`.
BREAKING = frozenset({"0012", "0015", "0016"})
#: Payload formats, and for each the revision whose clients are the first to read it.
FORMATS = {1: "0001", 2: "0015"}

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


run = Table(
    "run",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", Name, nullable=False, unique=True),
    # Policy versions compare only within a lineage. NULL matches the lineage of any buffer.
    Column("lineage", Name),
    Column("started_at", UtcDateTime, nullable=False),
    Column("metadata", Json, nullable=False),
    sqlite_autoincrement=True,
)

buffer = Table(
    "buffer",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", Name, nullable=False, unique=True),
    Column("settings", Settings, nullable=False),
    Column("policy_version", BigInteger, nullable=False),
    Column("policy_lineage", Name),
    # For SamplesPerInsert and Queue: counted since the limit was set.
    Column("limited_inserts", BigInteger, nullable=False),
    Column("limited_samples", BigInteger, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    # Tags whose values are being added to `group_tag`, or removed from it: for each name the id
    # below which groups are still to be processed. NULL: none.
    Column("pending_tags", Json),
    sqlite_autoincrement=True,
)

# A row for each task. Its lock keeps clocks and counters exact under concurrency.
task = Table(
    "task",
    metadata,
    Column("id", Id, primary_key=True),
    Column("buffer_id", ForeignKey("buffer.id", ondelete="CASCADE"), nullable=False),
    Column("task_name", Name, nullable=False),
    Column("max_staleness", BigInteger),
    Column("uniform_clock", Double, nullable=False),
    Column("priority_clock", Double, nullable=False),
    Column("random_counter", BigInteger, nullable=False),
    Column("num_available", BigInteger, nullable=False),
    Column("total_weight", Double, nullable=False),
    Column("weight_error", Double, nullable=False),
    Column("num_pending", BigInteger, nullable=False),
    Column("num_leased", BigInteger, nullable=False),
    # For the capacity: groups of every status but archived.
    Column("stored_groups", BigInteger, nullable=False),
    Column("stored_tokens", BigInteger, nullable=False),
    Column("stored_bytes", BigInteger, nullable=False),
    Column("num_inserted", BigInteger, nullable=False),
    Column("num_sampled", BigInteger, nullable=False),
    # How far the staleness of the groups was brought up to date: see `repository/aging.py`.
    Column("num_outdated", BigInteger, nullable=False, server_default=text("0")),
    Column("is_expiring", Boolean, nullable=False, server_default=false()),
    Column("aged_to", BigInteger),
    # Of `num_inserted`: groups whose put replaced the content of a stored group.
    Column("num_replaced", BigInteger, nullable=False, server_default=text("0")),
    UniqueConstraint("buffer_id", "task_name"),
    sqlite_autoincrement=True,
)

lease = Table(
    "lease",
    metadata,
    Column("id", Id, primary_key=True),
    Column("buffer_id", ForeignKey("buffer.id", ondelete="CASCADE"), nullable=False),
    Column("owner", Name, nullable=False),
    Column("acquired_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
    # Ids of groups that others, or a deadline, took from it: `AckReport.gone`. NULL: none.
    Column("lost_ids", Json),
    Index("ix_lease_expires_at", "buffer_id", "expires_at"),
    sqlite_autoincrement=True,
)

episode_group = Table(
    "episode_group",
    metadata,
    Column("id", Id, primary_key=True),
    Column("buffer_id", Id, nullable=False),
    Column("run_id", ForeignKey("run.id")),
    Column("group_uid", Name, nullable=False),
    Column("prompt_uid", Name),
    Column("task_name", Name, nullable=False),
    Column("group_status", String(16), nullable=False),
    # For live groups it may lag behind the policy version: `current_staleness` is exact.
    Column("staleness", BigInteger),
    Column("priority", Double, nullable=False),
    Column("weight", Double, nullable=False),
    Column("uniform_key", Double, nullable=False),
    Column("priority_key", Double, nullable=False),
    Column("min_policy_version", BigInteger),
    Column("max_policy_version", BigInteger),
    Column("num_episodes", Integer, nullable=False),
    Column("expected_episodes", Integer),
    Column("min_episodes", Integer),
    Column("deadline", UtcDateTime),
    Column("num_tokens", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("reward_mean", Double),
    Column("reward_std", Double),
    Column("reward_min", Double),
    Column("reward_max", Double),
    Column("times_sampled", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("lease_id", ForeignKey("lease.id", ondelete="SET NULL")),
    Column("leased_from", String(16)),
    Column("has_transcript", Boolean, nullable=False),
    Column("tags", Tags(none_as_null=True), nullable=False),
    Column("status_reason", Text),
    Column("created_at", UtcDateTime, nullable=False),
    Column("completed_at", UtcDateTime),
    Column("first_sampled_at", UtcDateTime),
    Column("last_sampled_at", UtcDateTime),
    Column("archived_at", UtcDateTime),
    # `min_policy_version` if it compares with the buffer's version, else NULL. Draws order by it.
    Column("comparable_version", BigInteger),
    # How often its content was replaced. Draws record it: see `draw_group`.
    Column("times_replaced", Integer, nullable=False, server_default=text("0")),
    # Whether it was archived by an eviction. Other archived groups were consumed, and are not
    # replaced.
    Column("is_evicted", Boolean, nullable=False, server_default=false()),
    # How often values were added to its content: see `annotation`.
    Column("times_annotated", Integer, nullable=False, server_default=text("0")),
    ForeignKeyConstraint(
        ["buffer_id", "task_name"], ["task.buffer_id", "task.task_name"], ondelete="CASCADE"
    ),
    CheckConstraint(
        f"group_status IN ({', '.join(repr(status.value) for status in GroupStatus)})",
        name="group_status",
    ),
    UniqueConstraint("buffer_id", "group_uid"),
    sqlite_autoincrement=True,
    # Free space for updates of `staleness` that change no index (see ix_..._staleness).
    postgresql_with={"fillfactor": 70},
)

#: Short name for the columns that most statements use.
group = episode_group.c

#: Statuses of groups that are not leased and can be drawn, expire or be evicted.
IDLE = (GroupStatus.COMPLETED, GroupStatus.ABORTED)
#: Literals instead of bound parameters: a planner uses a partial index only if it sees the values.
IS_IDLE = group.group_status.in_([literal_column(repr(status.value)) for status in IDLE])


def _index(name: str, *columns: ColumnElement[Any], where: ColumnElement[bool]) -> None:
    """Define an index of the rows that meet a condition."""
    Index(name, *columns, sqlite_where=where, postgresql_where=where)


#: Columns by which an index sorts idle groups, besides their exponential keys.
INDEXED = {group.priority, group.comparable_version, group.times_sampled, group.last_sampled_at}

# Each scheduling index matches both the WHERE and the ORDER BY of one kind of draw.
_PARTITION = (group.buffer_id, group.task_name, group.group_status)
Index("ix_episode_group_arrival", *_PARTITION, group.id)
for _key in INDEXED | {group.uniform_key, group.priority_key}:
    # Leased and archived groups are in none of these: a lease removes them, and an ack adds none.
    # Nor are groups that were never drawn in that of last draws: most queues draw a group once.
    _is_drawn = group.last_sampled_at.is_not(None)
    _indexed = IS_IDLE & _is_drawn if _key is group.last_sampled_at else IS_IDLE
    _index(f"ix_episode_group_{_key.name}", *_PARTITION, _key, group.id, where=_indexed)
# BRIN on PostgreSQL: after an advance, this column is rewritten in every live row. A BRIN index,
# unlike a B-tree, allows such updates to be heap-only (HOT).
Index(
    "ix_episode_group_staleness",
    episode_group.c.buffer_id,
    episode_group.c.staleness,
    postgresql_using="brin",
)
Index("ix_episode_group_prompt_uid", episode_group.c.buffer_id, episode_group.c.prompt_uid)
_index("ix_episode_group_lease_id", group.lease_id, where=group.lease_id.is_not(None))
_index(
    "ix_episode_group_deadline",
    group.buffer_id,
    group.deadline,
    where=group.deadline.is_not(None),
)


def _group_id() -> Column[Any]:
    return Column(
        "group_id",
        ForeignKey(
            "episode_group.id",
            ondelete="CASCADE",
            # Checked at commit: large rows are inserted first, before the task is locked.
            deferrable=True,
            initially="DEFERRED",
        ),
        primary_key=True,
    )


# Index of the tags that a buffer's settings name, for `tag_lookups`. A group has no row for a tag
# that is missing, null, an object or a list.
group_tag = Table(
    "group_tag",
    metadata,
    _group_id(),
    Column("name", Name, primary_key=True),
    Column("buffer_id", Id, nullable=False),
    # The first characters of a string, ordered by code point.
    Column("text", Text().with_variant(Text(collation="C"), "postgresql")),
    # A number as a double; 1 for true and 0 for false.
    Column("number", Double),
    Index("ix_group_tag_value", "buffer_id", "name", "text", "number", "group_id"),
    sqlite_with_rowid=False,
)

episode = Table(
    "episode",
    metadata,
    _group_id(),
    Column("position", Integer, primary_key=True),
    Column("reward", Double),
    Column("advantage", Double),
    Column("num_tokens", BigInteger, nullable=False),
    Column("num_loss_tokens", BigInteger, nullable=False),
    Column("num_turns", Integer, nullable=False),
    Column("min_policy_version", BigInteger),
    Column("max_policy_version", BigInteger),
    Column("finish_reason", Text),
    Column("metadata", GeneratedJson, nullable=False),
    # Tokens of the longest row to which its turns are merged. NULL: unknown, and `num_tokens` may
    # count what turns repeat.
    Column("longest_row", BigInteger),
    sqlite_with_rowid=False,
)

# A value of an episode or turn that was added or changed after it was stored.
annotation = Table(
    "annotation",
    metadata,
    _group_id(),
    # `times_annotated` of the group afterwards.
    Column("number", Integer, primary_key=True),
    Column("position", Integer, primary_key=True),
    # Number of the turn; -1: the episode itself.
    Column("turn", Integer, primary_key=True),
    # "reward", "advantage" or "metadata".
    Column("name", Name, primary_key=True),
    Column("value", Double),
    Column("previous", Double),
    # Of metadata: by name the new value, as "to", and the previous one, as "from".
    Column("changes", GeneratedJson),
    Column("author", Name),
    Column("policy_version", BigInteger),
    Column("run_id", ForeignKey("run.id", ondelete="SET NULL")),
    Column("created_at", UtcDateTime, nullable=False),
    sqlite_with_rowid=False,
)

# What an episode of a pending group lacks, or lacked when the group was closed: the episode itself,
# which is a trajectory until it is finished, or a value that the settings require.
trajectory = Table(
    "trajectory",
    metadata,
    _group_id(),
    Column("position", Integer, primary_key=True),
    # "episode", or the name of a value.
    Column("missing", Name, primary_key=True, server_default=text("'episode'")),
    Column("buffer_id", Id, nullable=False),
    # Claims of it that ended without it.
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    # Turns that were appended to it.
    Column("num_turns", Integer, nullable=False, server_default=text("0")),
    # The claim that holds it. NULL: it is not claimed.
    Column("claim_uid", Name),
    Column("claimed_by", Name),
    Column("claimed_at", UtcDateTime),
    Column("expires_at", UtcDateTime),
    # Why it is missing and will be. NULL: it is open.
    Column("unusable_reason", Text),
    Index("ix_trajectory_claim_uid", "claim_uid"),
    sqlite_with_rowid=False,
)
_is_open = trajectory.c.unusable_reason.is_(None)
_index(
    "ix_trajectory_open",
    trajectory.c.buffer_id,
    trajectory.c.missing,
    trajectory.c.group_id,
    trajectory.c.position,
    where=_is_open & trajectory.c.claim_uid.is_(None),
)
_index(
    "ix_trajectory_expires_at",
    trajectory.c.buffer_id,
    trajectory.c.expires_at,
    where=trajectory.c.expires_at.is_not(None),
)

# A turn of an episode, or of a trajectory that is not finished.
turn = Table(
    "turn",
    metadata,
    _group_id(),
    Column("position", Integer, primary_key=True),
    # Number of the turn in its episode, from 0.
    Column("turn", Integer, primary_key=True),
    Column("turn_uid", Name),
    Column("parent", Integer),
    Column("agent", Name),
    Column("state", Text),
    Column("finish_reason", Text),
    Column("reward", Double),
    Column("num_prompt_tokens", BigInteger, nullable=False),
    Column("num_tokens", BigInteger, nullable=False),
    Column("num_loss_tokens", BigInteger, nullable=False),
    Column("min_policy_version", BigInteger),
    Column("max_policy_version", BigInteger),
    Column("is_discarded", Boolean, nullable=False, server_default=false()),
    Column("metadata", GeneratedJson, nullable=False),
    # NULL: it was stored with its episode.
    Column("appended_at", UtcDateTime),
    UniqueConstraint("group_id", "turn_uid"),
    sqlite_with_rowid=False,
)

# What a client must support to use this store: one row.
compatibility = Table(
    "compatibility",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=False),
    # The oldest release that can use the store. It follows from the revision and `write_format`;
    # releases that do not know the revision read it here.
    Column("min_client", Name, nullable=False),
    # The format of new payloads. No stored payload has a later one.
    Column("write_format", SmallInteger, nullable=False),
    CheckConstraint("id = 1", name="id"),
)

# The payload store, if payloads are outside the database: one row, or none.
payload_place = Table(
    "payload_place",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=False),
    # Without secrets, because it is shown.
    Column("url", Text, nullable=False),
    Column("store_uid", Name, nullable=False),
    Column("grace_seconds", Double, nullable=False),
    CheckConstraint("id = 1", name="id"),
)

# An object that holds parts of payloads outside the database, written once.
pack = Table(
    "pack",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", Name, nullable=False, unique=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    # Parts that rows of `payload` refer to, and their bytes.
    Column("live_parts", BigInteger, nullable=False),
    Column("live_bytes", BigInteger, nullable=False),
    # When the pack was marked for deletion, because it has no live parts.
    Column("condemned_at", UtcDateTime),
    # Whether the object is being removed or was removed. It is never reset. Rows of orphans also
    # have a `num_bytes` of 0.
    Column("removing", Boolean, nullable=False),
    sqlite_autoincrement=True,
)
_index("ix_pack_condemned_at", pack.c.condemned_at, where=pack.c.condemned_at.is_not(None))

# A pack is compacted if at most half of its bytes are live. With literals, and the column on the
# left, so that planners recognize the condition of the index.
is_mostly_dead = (pack.c.live_parts > literal_column("0")) & (
    pack.c.num_bytes >= literal_column("2") * pack.c.live_bytes
)
_index("ix_pack_mostly_dead", pack.c.live_bytes, pack.c.id, where=is_mostly_dead)

# Autovacuum does not pause between the pages of these tables (0: no delay), because their deleted
# rows can grow faster than a vacuum with pauses removes them.
_VACUUM_AT_ONCE = {
    "autovacuum_vacuum_cost_delay": 0,
    "toast.autovacuum_vacuum_cost_delay": 0,
}

#: Number of the part of a payload that holds no episode. Those that hold episodes are numbered by
#: the position of the first one, and those with a column have numbers below.
CONTEXT_PART = -1
#: Number of the part with values that arrived after the episodes: see `codec/late.py`.
LATE_PART = 2**31 - 1
#: `annotation.turn` of the values of an episode itself.
OF_EPISODE = -1

# All payload bytes are here or in packs, so the selection of a draw reads no page of them.
# STORAGE EXTERNAL on PostgreSQL is set by the migration (metadata cannot express it).
payload = Table(
    "payload",
    metadata,
    _group_id(),
    Column("part", Integer, primary_key=True),
    Column("codec_version", SmallInteger, nullable=False),
    Column("checksum", BigInteger, nullable=False),
    Column("data", LargeBinary),
    # Checked at commit: a put reads last whether the pack may still be used.
    Column("pack_id", ForeignKey("pack.id", deferrable=True, initially="DEFERRED")),
    Column("pack_offset", BigInteger),
    Column("pack_length", BigInteger),
    # The column that the part holds; NULL: all others, and the structure of its episodes.
    Column("field", Text),
    # The part whose episodes the column belongs to. Of a turn of an unfinished trajectory, which
    # has no field: the position of the trajectory.
    Column("of_part", Integer),
    # Size of the tensors in memory. NULL in format 1.
    Column("expanded_bytes", BigInteger),
    CheckConstraint(
        "data IS NOT NULL AND pack_id IS NULL OR data IS NULL AND pack_id IS NOT NULL "
        "AND pack_offset IS NOT NULL AND pack_length IS NOT NULL",
        name="place",
    ),
    postgresql_with=_VACUUM_AT_ONCE,
)
#: Whether a part is a turn of an unfinished trajectory.
IS_OF_TURN = payload.c.field.is_(None) & payload.c.of_part.is_not(None)
_index("ix_payload_pack_id", payload.c.pack_id, where=payload.c.pack_id.is_not(None))
# SQLite reads all pages of a large value to reach a column behind it, so columns are found here.
_index(
    "ix_payload_field",
    payload.c.group_id,
    payload.c.field,
    payload.c.part,
    where=payload.c.field.is_not(None),
)

transcript = Table(
    "transcript",
    metadata,
    _group_id(),
    Column("position", Integer, primary_key=True),
    Column("text", GeneratedText, nullable=False),
    postgresql_with=_VACUUM_AT_ONCE,
)

draw = Table(
    "draw",
    metadata,
    Column("id", Id, primary_key=True),
    Column("buffer_id", ForeignKey("buffer.id", ondelete="CASCADE"), nullable=False),
    Column("run_id", ForeignKey("run.id")),
    Column("step", BigInteger),
    Column("policy", Name, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Index("ix_draw_step", "buffer_id", "step"),
    Index("ix_draw_latest", "buffer_id", "id"),
    sqlite_autoincrement=True,
)

# `group_id` is no foreign key: lineage outlives the groups it names.
draw_group = Table(
    "draw_group",
    metadata,
    Column("draw_id", ForeignKey("draw.id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("group_id", Id, nullable=False, index=True),
    Column("probability", Double, nullable=False),
    Column("weight", Double, nullable=False),
    Column("staleness", BigInteger),
    # The outcome; NULL for draws by versions that did not record it. For sampled groups it is known
    # at the draw, so `outcome_at` is NULL.
    Column(
        "outcome",
        String(16),
        CheckConstraint(
            f"outcome IN ({', '.join(repr(outcome.value) for outcome in DrawOutcome)})",
            name="outcome",
        ),
    ),
    Column("outcome_reason", Text),
    Column("outcome_at", UtcDateTime),
    # `times_replaced` of the group at the draw; NULL: all that is known is a later replacement.
    Column("times_replaced", Integer, server_default=text("0")),
    # What was drawn, copied from the group when a put replaced it; otherwise NULL. `group_run_id`
    # is no foreign key: lineage outlives runs that put groups.
    Column("task_name", Name),
    Column("prompt_uid", Name),
    Column("group_run_id", Id),
    Column("reward_mean", Double),
    Column("reward_std", Double),
    Column("min_policy_version", BigInteger),
    Column("max_policy_version", BigInteger),
    Column("num_tokens", BigInteger),
    # `times_annotated` of the group at the draw; NULL: no annotation has changed it since.
    Column("times_annotated", Integer),
    sqlite_with_rowid=False,
)
#: A literal, for the same reason as in `IS_IDLE`.
IS_LEASED = draw_group.c.outcome == literal_column(repr(DrawOutcome.LEASED.value))
# With this index an ack reads only its own rows, however often the groups were drawn before.
_index("ix_draw_group_leased", draw_group.c.group_id, where=IS_LEASED)

# Changes of a buffer's policy version or lineage.
policy_change = Table(
    "policy_change",
    metadata,
    Column("id", Id, primary_key=True),
    Column("buffer_id", ForeignKey("buffer.id", ondelete="CASCADE"), nullable=False),
    Column("run_id", ForeignKey("run.id", ondelete="SET NULL")),
    Column("policy_version", BigInteger, nullable=False),
    Column("lineage", Name),
    Column("began_at", UtcDateTime, nullable=False),
    Index("ix_policy_change_latest", "buffer_id", "id"),
)

cursor = Table(
    "cursor",
    metadata,
    Column("buffer_id", ForeignKey("buffer.id", ondelete="CASCADE"), primary_key=True),
    Column("name", Name, primary_key=True),
    Column("value", AnyJson, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
    sqlite_with_rowid=False,
)

# A row for each connection to PostgreSQL that writes, in which each of its transactions stores its
# number: see `postgresql/commits.py`. On SQLite no answer to a commit is lost.
commit_proof = Table(
    "commit_proof",
    metadata,
    Column("connection_uid", Uuid, primary_key=True),
    Column("transaction_number", BigInteger, nullable=False),
    Column("written_at", UtcDateTime, nullable=False),
    # Free space for updates on the same page.
    postgresql_with={"fillfactor": 50},
)

#: Tables whose ids the engine generates. On PostgreSQL each has a sequence.
GENERATED: tuple[Table, ...] = tuple(
    one for one in metadata.sorted_tables if one.autoincrement_column is not None
)


def own_tables() -> dict[str, Table]:
    """Return replaydb's tables by name. Views have no primary key."""
    return {name: one for name, one in metadata.tables.items() if len(one.primary_key)}
