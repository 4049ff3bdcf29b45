"""Read-only web UI of a store. Needs the extra `replaydb[ui]`."""

from replaydb import extras

extras.need("ui", "replaydb ui")

from replaydb.publishing import publish
from replaydb.ui.app import application
from replaydb.ui.serving import serve

__all__ = ["application", "serve"]

publish(__name__, __all__)
del extras, publish
