"""Print what is missing to tag the version of `pyproject.toml` (`make release-check`).

    python tests/untagged.py [CHECKOUT]

The exit code is 1 if anything is.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

_URLS = ("Documentation", "Issues", "Repository")


def missing(checkout: Path) -> list[str]:
    """Return what is missing, one sentence each."""

    def text(name: str) -> str:
        return (checkout / name).read_text(encoding="utf8")

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    project = tomllib.loads(text("pyproject.toml"))["project"]
    version = project["version"]
    absent = [one for one in _URLS if one not in project.get("urls", {})]
    changes = git("status", "--porcelain").splitlines()
    dated = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    is_dated = re.search(dated, text("CHANGELOG.md"), re.MULTILINE)
    found = {
        f"CHANGELOG.md: the section [{version}] has no date": not is_dated,
        "CITATION.cff: no date-released": "\ndate-released: " not in text("CITATION.cff"),
        f"pyproject.toml: no {', '.join(absent)} in [project.urls]": bool(absent),
        f"git: {len(changes)} files have changes that are not committed": bool(changes),
        f"git: the tag v{version} exists already": bool(git("tag", "--list", f"v{version}")),
    }
    return [what for what, is_so in found.items() if is_so]


if __name__ == "__main__":
    sentences = missing(Path(*sys.argv[1:]))
    for sentence in sentences:
        print(f"missing: {sentence}")
    print("not ready to tag" if sentences else "ready to tag")
    sys.exit(bool(sentences))
