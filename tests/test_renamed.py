"""Attributes that were renamed keep working under their old names, with a warning."""

import pytest

from replaydb import PruneReport
from replaydb.domain.results import Finding


@pytest.mark.parametrize(
    ("thing", "old", "new"),
    [
        (PruneReport(dry_run=True, num_marked=3), "num_condemned", "num_marked"),
        (PruneReport(dry_run=True, marked_bytes=70), "condemned_bytes", "marked_bytes"),
        (Finding("bad", "tables", "no", "replaydb db upgrade"), "mend", "fix"),
    ],
)
def test_old_names_warn(thing: object, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} was renamed to {new}"):
        assert getattr(thing, old) == getattr(thing, new)
