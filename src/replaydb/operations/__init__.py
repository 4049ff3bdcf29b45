"""What an operator does with a whole store.

copy     a store made again in another database, on another engine, with payloads elsewhere
doctor   what is wrong with a store and what it stands on
removal  groups, draws, buffers and runs deleted, some at a time, while others use the store
roles    who may do what on PostgreSQL
vacuum   space given back to the system
verify   every payload, row and account looked at; accounts repaired
"""

from replaydb.operations.copy import CopyReport, copy
from replaydb.operations.doctor import examine
from replaydb.operations.removal import (
    Removal,
    delete_buffer,
    delete_run,
    prune_draws,
    prune_groups,
)
from replaydb.operations.roles import roles
from replaydb.operations.vacuum import VacuumReport, vacuum
from replaydb.operations.verify import Problem, VerifyReport, verify
from replaydb.publishing import publish
from replaydb.results import Finding

__all__ = [
    "CopyReport",
    "Finding",
    "Problem",
    "Removal",
    "VacuumReport",
    "VerifyReport",
    "copy",
    "delete_buffer",
    "delete_run",
    "examine",
    "prune_draws",
    "prune_groups",
    "roles",
    "vacuum",
    "verify",
]

publish(__name__, __all__)
del publish
