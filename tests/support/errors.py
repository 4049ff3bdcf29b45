"""Text of errors, to check that they reveal no secrets."""

from __future__ import annotations

import traceback


def all_error_text(error: BaseException) -> str:
    """Return all text of an error and its causes that a log or crash reporter would contain."""
    texts = traceback.format_exception(error)
    one: BaseException | None = error
    while one is not None:
        texts += [str(one), repr(one)]
        one = one.__cause__ or one.__context__
    return "".join(texts)
