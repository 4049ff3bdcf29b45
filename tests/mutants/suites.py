"""Test suites for the mutants of each file: about a minute of tests, most relevant first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mutants.generate import PACKAGE

SQLITE = "not postgresql"
POSTGRESQL = "not sqlite"
BOTH = ""

#: Slow, specialized tests, which only suites that list them include.
_LONG = (
    "buffer/leasing/test_lease_cancelled.py",
    "buffer/leasing/test_undelivered_leases.py",
    "buffer/putting/test_uniform_eviction.py",
    "buffer/sampling/test_extremes.py",
    "buffer/sampling/test_proportions.py",
    "buffer/sampling/test_sample_waiting.py",
    "buffer/sampling/test_seeds.py",
    "database/engines/test_files_lost.py",
    "database/engines/test_pgbouncer.py",
    "database/engines/test_pgbouncer_restarts.py",
    "ui/browser",
)


@dataclass(frozen=True)
class Suite:
    """Tests that are run for a mutant until one fails."""

    first: tuple[str, ...]
    """Tests that run first and detect most mutants."""
    others: tuple[str, ...]
    engine: str
    """Expression of `pytest -k` that selects the engine."""

    @property
    def name(self) -> str:
        """Name of the suite, shared by suites that differ only in the order of tests."""
        return " ".join((self.engine, *sorted({*self.first, *self.others})))

    @property
    def options(self) -> list[str]:
        """Command line options of pytest."""
        paths = dict.fromkeys(self.first + self.others)
        ignored = (f"--ignore=tests/{path}" for path in _LONG if path not in paths)
        return ["-k", self.engine, *ignored, *(f"tests/{path}" for path in paths)]


def _suite(first: str, others: str = "", engine: str = SQLITE) -> Suite:
    return Suite(tuple(first.split()), tuple(others.split()), engine)


_CALLS = (
    "buffer/test_state_machine.py buffer/test_model.py "
    "buffer/putting buffer/leasing buffer/sampling buffer/inspecting buffer/managing"
)
_WAITS = "buffer/sampling/test_sample_waiting.py"
_RATES = "buffer/test_rate_limits.py"
_LOST = "buffer/leasing/test_lease_cancelled.py buffer/leasing/test_undelivered_leases.py"
_DRAWS = (
    "buffer/sampling database/repository/test_tags.py "
    "buffer/sampling/test_proportions.py buffer/sampling/test_seeds.py"
)
_PACKS = "packs/test_folder.py packs/test_store.py"
_ENGINES = "database/engines database/test_transactions.py buffer/test_wakes.py buffer/putting"

#: Suites by the beginning of a path; the longest match counts.
_SUITES = {
    "codec/": _suite("codec", "batch"),
    "batch/": _suite("batch", "codec domain/test_checks.py buffer/leasing/test_regeneration.py"),
    "batch/stored": _suite("buffer/putting/test_put.py batch", "buffer/leasing"),
    "buffer/": _suite("domain/test_checks.py", _CALLS),
    "buffer/core": _suite("packs/test_cache.py domain/test_checks.py", _CALLS),
    "buffer/putting": _suite("buffer/putting", _CALLS),
    "buffer/pacing": _suite("buffer/test_pacing.py buffer/test_rate_limits.py", "buffer/putting"),
    "buffer/waiting": _suite(f"buffer/test_wakes.py {_WAITS}", "buffer/sampling buffer/putting"),
    "buffer/drawing": _suite(f"buffer/sampling {_WAITS} {_LOST}", _CALLS),
    "buffer/leas": _suite(f"buffer/leasing {_LOST}", _CALLS),
    "buffer/loader": _suite("buffer/test_loader.py"),
    "buffer/inspecting": _suite("buffer/inspecting packs/test_cache.py", _CALLS),
    "buffer/managing": _suite("buffer/managing", _CALLS),
    "database/": _suite("database/test_statements.py database/test_filters.py", _CALLS),
    "database/copying": _suite("operations/test_copy.py"),
    "database/filters/": _suite("database/test_filters.py", _CALLS),
    "database/filters/parsing": _suite("database/test_filter_texts.py", "ui"),
    "database/runtime/group_commit": _suite("database/test_group_commit.py", "buffer/putting"),
    "database/migrations": _suite("database/migrations", engine=BOTH),
    "database/payloads": _suite(
        "database/test_payloads.py database/test_instances.py buffer/test_outside.py", _PACKS
    ),
    "database/pruning": _suite("database/test_pruning.py", "operations"),
    "database/runtime/revisions": _suite("database/migrations", engine=BOTH),
    "database/tables/schema": _suite("database/migrations/test_schema.py", _CALLS),
    "database/runtime/transactions": _suite("database/test_transactions.py", _ENGINES, BOTH),
    "database/runtime/writes": _suite("database/test_writes.py", _CALLS, BOTH),
    "database/urls": _suite("database/engines/test_urls.py", engine=BOTH),
    "database/tables/views": _suite("analysis", "database/migrations/test_schema.py"),
    "database/runtime/": _suite(_ENGINES, engine=BOTH),
    "database/postgresql/": _suite(
        "operations/test_sequences.py database/test_failover.py operations/test_copy.py",
        _ENGINES,
        POSTGRESQL,
    ),
    "database/postgresql/administration": _suite("operations", engine=POSTGRESQL),
    "database/postgresql/checkup": _suite("operations", engine=POSTGRESQL),
    "database/postgresql/commits": _suite(
        "database/test_lost_answers.py database/test_failover.py", _ENGINES, POSTGRESQL
    ),
    "database/postgresql/index_builds": _suite(
        "database/migrations/test_missing_indexes.py", engine=POSTGRESQL
    ),
    "database/postgresql/instance": _suite("database/test_instances.py", engine=POSTGRESQL),
    "database/postgresql/roles": _suite("operations", engine=POSTGRESQL),
    "database/postgresql/sql": _suite("analysis database/test_filters.py", "", POSTGRESQL),
    "database/postgresql/sequences": _suite("operations", engine=POSTGRESQL),
    "database/sqlite/": _suite(_ENGINES, "operations"),
    "database/sqlite/checkup": _suite("operations"),
    "database/sqlite/damage": _suite("operations"),
    "database/sqlite/file": _suite(
        "database/engines/test_files_lost.py", f"{_ENGINES} cli/test_copy.py operations"
    ),
    "database/sqlite/guard": _suite("database/engines/test_files_lost.py", _ENGINES),
    "database/sqlite/sql": _suite("buffer/inspecting database/test_filters.py", "ui"),
    "database/repository/": _suite(_CALLS),
    "database/statements/": _suite(_CALLS),
}
for _folder in "database/repository/", "database/statements/":
    _SUITES |= {
        f"{_folder}{name}": suite
        for suite, names in (
            (
                _suite(_DRAWS, _CALLS),
                "choosing draw_request draws ordered_reads selections taking",
            ),
            (_suite("buffer/putting", _CALLS), "capacity incremental_groups puts"),
            (_suite("buffer/leasing", _CALLS), "lease"),
            (_suite("buffer/managing", f"{_CALLS} {_RATES}"), "aging buffer policy task updates"),
            (_suite(f"buffer/test_pacing.py {_RATES}", _CALLS), "limits shortage"),
            (
                _suite("buffer/inspecting", f"{_CALLS} ui"),
                "draw groups lineage listing metrics preview run_totals statistics",
            ),
            (
                _suite("operations", _CALLS),
                "damage recount retention row_differences sequences table_ranges",
            ),
            (_suite("analysis", "ui exchange"), "scans"),
            (_suite("database/repository/test_tags.py", _CALLS), "tag"),
            (
                _suite("database/test_pruning.py buffer/test_outside.py", _PACKS),
                "pack payload_location",
            ),
            (_suite("buffer/inspecting", f"{_PACKS} buffer/test_outside.py"), "payload"),
        )
        for name in names.split()
    }
# A statement that reads too much returns the same rows.
for _name, _one in list(_SUITES.items()):
    if _name.startswith(("database/filters/", "database/repository/", "database/statements/")):
        _SUITES[_name] = replace(_one, first=(*_one.first, "database/repository/test_plans.py"))


def suite_of(path: Path) -> Suite:
    """Return the suite for a file of the package."""
    name = path.relative_to(PACKAGE).as_posix()
    return _SUITES[max((prefix for prefix in _SUITES if name.startswith(prefix)), key=len)]
