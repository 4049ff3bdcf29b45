"""Text from users, sizes and durations formatted for people."""

from __future__ import annotations

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def printable(text: str) -> str:
    """Escape characters of foreign text that would move the cursor or change the text direction."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii")
        for sign in text
    )


def visible(text: str) -> str:
    """Escape text like `printable`, but keep line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def human_size(num_bytes: float) -> str:
    """Format bytes with three digits and a unit."""
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


def human_seconds(seconds: float) -> str:
    """Format a duration with a unit."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if abs(seconds) >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.0f} s"
