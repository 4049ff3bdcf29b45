"""Export and import of groups: Parquet or JSON Lines files in a folder or object store.

    from replaydb.exchange import export_groups, import_groups

    export_groups("sqlite:///grpo.db", "s3://experiments/grpo", buffer="math")
    import_groups("postgresql://...", "s3://experiments/grpo", create=True)

`docs/exchange.md` documents the files. Needs the extra `replaydb[analysis]`.
"""

from replaydb.util import extras

extras.need("analysis", "export and import of files")

from replaydb.exchange.exporting import ExportReport, export_groups
from replaydb.exchange.importing import ImportReport, import_groups
from replaydb.util.publishing import publish

__all__ = ["ExportReport", "ImportReport", "export_groups", "import_groups"]

publish(__name__, __all__)
del extras, publish
