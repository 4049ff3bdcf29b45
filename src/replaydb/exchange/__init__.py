"""Groups in files, and back: Parquet or JSON lines, in a folder or an object store.

    from replaydb.exchange import export_groups, import_groups

    export_groups("sqlite:///grpo.db", "s3://experiments/grpo", buffer="math")
    import_groups("postgresql://...", "s3://experiments/grpo", create=True)

`docs/exchange.md` says what the files hold. Needs the extra `replaydb[analysis]`.
"""

from replaydb import extras

extras.need("analysis", "export and import of files")

from replaydb.exchange.exporting import ExportReport, export_groups
from replaydb.exchange.importing import ImportReport, import_groups
from replaydb.publishing import publish

__all__ = ["ExportReport", "ImportReport", "export_groups", "import_groups"]

publish(__name__, __all__)
del extras, publish
