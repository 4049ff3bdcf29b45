"""Contents of a store as Arrow tables, for pandas, polars, DuckDB and other Arrow readers.

    from replaydb import analysis

    analysis.episodes("sqlite:///grpo.db", buffer="math").to_pandas()
    duckdb.sql("SELECT ... FROM groups")  # where groups = analysis.groups(url)

Every call takes the URL of a store and is read-only and synchronous; it also works inside a running
event loop (notebooks). The returned `Rows` are lazy: each reading queries the store again, page by
page.

Needs the extra `replaydb[analysis]`; `to_pandas` also needs pandas.
"""

from replaydb.util import extras

extras.need("analysis", "replaydb.analysis")

from replaydb.analysis.arrow import Rows
from replaydb.analysis.decoded import tokens
from replaydb.analysis.tables import (
    annotation_history,
    draws,
    episodes,
    groups,
    policies,
    prompts,
    runs,
    turns,
)
from replaydb.util.publishing import publish

__all__ = [
    "Rows",
    "annotation_history",
    "draws",
    "episodes",
    "groups",
    "policies",
    "prompts",
    "runs",
    "tokens",
    "turns",
]

publish(__name__, __all__)
del extras, publish
