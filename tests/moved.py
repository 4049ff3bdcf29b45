"""Print which installed packages have another version than a constraints file, as Markdown.

    ENVIRONMENT/bin/python tests/moved.py constraints.txt

Without packages: the standard library of any environment suffices.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path


def moved(constraints: str, installed: dict[str, str]) -> list[str]:
    """Return the rows of a table: packages whose installed version is not the pinned one."""
    rows = []
    for line in constraints.splitlines():
        name, _, pinned = line.partition("==")
        found = installed.get(_normal(name))
        if pinned and found and found.partition("+")[0] != pinned:  # 2.13.0+cpu is 2.13.0
            rows.append(f"| {name} | {pinned} | {found} |")
    return rows


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    found = {_normal(one.name): one.version for one in distributions()}
    rows = moved(Path(sys.argv[1]).read_text(encoding="utf8"), found)
    print("| package | pinned | installed |", "| --- | --- | --- |", *rows, sep="\n")
