"""Maintenance operations on a whole store.

copy       copy a store to another database, engine or payload location
doctor     check the health of a store and its database
removal    delete groups, draws, buffers and runs in short transactions
rewriting  rewrite payloads of older formats
roles      PostgreSQL roles with the least privileges
vacuum     reclaim disk space
verify     check every payload, row and counter; repair counters
"""

from replaydb.domain.results import Finding
from replaydb.operations.copy import CopyReport, copy
from replaydb.operations.doctor import examine
from replaydb.operations.removal import (
    Removal,
    delete_buffer,
    delete_run,
    prune_draws,
    prune_groups,
)
from replaydb.operations.rewriting import RewriteReport, rewrite_payloads
from replaydb.operations.roles import roles
from replaydb.operations.vacuum import VacuumReport, vacuum
from replaydb.operations.verify import Problem, VerifyReport, verify
from replaydb.util.publishing import publish

__all__ = [
    "CopyReport",
    "Finding",
    "Problem",
    "Removal",
    "RewriteReport",
    "VacuumReport",
    "VerifyReport",
    "copy",
    "delete_buffer",
    "delete_run",
    "examine",
    "prune_draws",
    "prune_groups",
    "rewrite_payloads",
    "roles",
    "vacuum",
    "verify",
]

publish(__name__, __all__)
del publish
