"""What is stored, as Arrow tables: for pandas, polars, DuckDB and whatever else reads Arrow.

    from replaydb import analysis

    analysis.episodes("sqlite:///grpo.db", buffer="math").to_pandas()
    duckdb.sql("SELECT ... FROM groups")  # where groups = analysis.groups(url)

Every call takes the URL of a store, reads only, needs no event loop and minds none that runs. What
it gives is lazy: `Rows` reads when it is asked for rows, again each time, and a page at a time.

Needs the extra `replaydb[analysis]`; `to_pandas` also needs pandas.
"""

from replaydb import extras

extras.need("analysis", "replaydb.analysis")

from replaydb.analysis.decoded import tokens
from replaydb.analysis.rows import Rows
from replaydb.analysis.tables import draws, episodes, groups, policies, prompts, runs
from replaydb.publishing import publish

__all__ = ["Rows", "draws", "episodes", "groups", "policies", "prompts", "runs", "tokens"]

publish(__name__, __all__)
del extras, publish
