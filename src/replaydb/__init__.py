"""A SQL-backed persistent experience store for RL post-training of language models."""

import sys
import typing

from replaydb.batch.batch import Batch
from replaydb.batch.columns import UNKNOWN_VERSION
from replaydb.batch.stored import StoredGroup
from replaydb.domain.annotations import Annotation
from replaydb.domain.episodes import Episode, EpisodeGroup, GroupStatus, Ragged, Turn
from replaydb.domain.policies import (
    Fifo,
    FreshestFirst,
    LeastSampled,
    Lifo,
    Mix,
    Prioritized,
    SamplingPolicy,
    Share,
    StalestFirst,
    TopPriority,
    Uniform,
)
from replaydb.domain.results import (
    AckReport,
    BufferInfo,
    BufferStats,
    DrawInfo,
    DrawOutcome,
    EpisodeInfo,
    GroupInfo,
    GroupTotals,
    LeaseInfo,
    PromptInfo,
    PruneReport,
    RunInfo,
    RunStats,
    TaskCounters,
    TrajectoryInfo,
    VersionTotals,
)
from replaydb.domain.settings import (
    BufferSettings,
    Capacity,
    Keep,
    MinSize,
    Queue,
    SamplesPerInsert,
    SettingsChanges,
)
from replaydb.errors import (
    BufferFullError,
    ClaimExpiredError,
    ClientTooOldError,
    ConsumedGroupError,
    ContentChangedError,
    CorruptPayloadError,
    DatabaseError,
    DatabaseFullError,
    DatabaseReadOnlyError,
    DatabaseReplacedError,
    DatabaseUnavailableError,
    DuplicateEpisodeError,
    DuplicateGroupError,
    DuplicateTurnError,
    GroupClosedError,
    GroupLeasedError,
    InvalidInputError,
    InvalidSettingsError,
    InvalidURLError,
    LeaseExpiredError,
    NotEnoughGroupsError,
    NotSupportedError,
    OutcomeUnknownError,
    PayloadGoneError,
    PayloadsReadOnlyError,
    PayloadsUnavailableError,
    RateLimitedError,
    ReplayDBError,
    SchemaError,
    SchemaOutOfDateError,
    StoreClosedError,
    TrajectoryClaimedError,
    UnknownBufferError,
    UnknownDrawError,
    UnknownGroupError,
    UnknownRunError,
    UnknownTurnError,
)
from replaydb.util.publishing import publish
from replaydb.util.release import VERSION

if typing.TYPE_CHECKING:
    from replaydb.buffer import (
        Buffer,
        Claim,
        Durability,
        Lease,
        Loader,
        LoaderState,
        OnDuplicate,
        Store,
        col,
    )

__all__ = [
    "UNKNOWN_VERSION",
    "AckReport",
    "Annotation",
    "Batch",
    "Buffer",
    "BufferFullError",
    "BufferInfo",
    "BufferSettings",
    "BufferStats",
    "Capacity",
    "Claim",
    "ClaimExpiredError",
    "ClientTooOldError",
    "ConsumedGroupError",
    "ContentChangedError",
    "CorruptPayloadError",
    "DatabaseError",
    "DatabaseFullError",
    "DatabaseReadOnlyError",
    "DatabaseReplacedError",
    "DatabaseUnavailableError",
    "DrawInfo",
    "DrawOutcome",
    "DuplicateEpisodeError",
    "DuplicateGroupError",
    "DuplicateTurnError",
    "Durability",
    "Episode",
    "EpisodeGroup",
    "EpisodeInfo",
    "Fifo",
    "FreshestFirst",
    "GroupClosedError",
    "GroupInfo",
    "GroupLeasedError",
    "GroupStatus",
    "GroupTotals",
    "InvalidInputError",
    "InvalidSettingsError",
    "InvalidURLError",
    "Keep",
    "Lease",
    "LeaseExpiredError",
    "LeaseInfo",
    "LeastSampled",
    "Lifo",
    "Loader",
    "LoaderState",
    "MinSize",
    "Mix",
    "NotEnoughGroupsError",
    "NotSupportedError",
    "OnDuplicate",
    "OutcomeUnknownError",
    "PayloadGoneError",
    "PayloadsReadOnlyError",
    "PayloadsUnavailableError",
    "Prioritized",
    "PromptInfo",
    "PruneReport",
    "Queue",
    "Ragged",
    "RateLimitedError",
    "ReplayDBError",
    "RunInfo",
    "RunStats",
    "SamplesPerInsert",
    "SamplingPolicy",
    "SchemaError",
    "SchemaOutOfDateError",
    "SettingsChanges",
    "Share",
    "StalestFirst",
    "Store",
    "StoreClosedError",
    "StoredGroup",
    "TaskCounters",
    "TopPriority",
    "TrajectoryClaimedError",
    "TrajectoryInfo",
    "Turn",
    "Uniform",
    "UnknownBufferError",
    "UnknownDrawError",
    "UnknownGroupError",
    "UnknownRunError",
    "UnknownTurnError",
    "VersionTotals",
    "col",
]
__version__ = VERSION

publish(__name__, [name for name in __all__ if name in globals()])
del publish, VERSION


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not typing.TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Import what needs SQLAlchemy at its first use: most of the time that an import takes."""
        if name not in __all__:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[__name__])
        from replaydb import buffer

        found = globals()[name] = getattr(buffer, name)
        return found
