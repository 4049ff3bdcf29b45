"""Texts of others, sizes and times as people can read them."""

from __future__ import annotations

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def printable(text: str) -> str:
    """Text of others as it can be shown: what would move the cursor or turn the text is escaped."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii")
        for sign in text
    )


def visible(text: str) -> str:
    """As `printable`, but ends of lines stay as they are."""
    return "\n".join(map(printable, text.split("\n")))


def human_size(num_bytes: float) -> str:
    """Bytes in three digits."""
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


def human_seconds(seconds: float) -> str:
    """A time in three digits."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if abs(seconds) >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.0f} s"
