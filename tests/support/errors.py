"""What an error gives away."""

from __future__ import annotations

import traceback


def everything_said_by(error: BaseException) -> str:
    """What a log, a debugger or a crash reporter would show of an error and its causes."""
    said = traceback.format_exception(error)
    seen: BaseException | None = error
    while seen is not None:
        said += [str(seen), repr(seen)]
        seen = seen.__cause__ or seen.__context__
    return "".join(said)
