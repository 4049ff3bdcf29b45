"""An environment for each peer, made once: `.venv/peers/NAME`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

CHECKOUT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).parent / "requirements"
ENVIRONMENTS = CHECKOUT / ".venv" / "peers"
# The pins of this project are not those of the peers.
_VARIABLES = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}


class InstallError(Exception):
    """pip could not; the message says where its output is."""


def python_of(name: str | None, console: Console) -> Path:
    """The interpreter of an environment, which is made or completed first where it has to be."""
    if name is None:
        return Path(sys.executable)
    folder = ENVIRONMENTS / name
    wanted = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf8")
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text(encoding="utf8") != wanted:
        start = time.monotonic()
        with console.status(f"Installing {name}: {wanted.count('==')} packages"):
            _install(folder, REQUIREMENTS / f"{name}.txt")
        stamp.write_text(wanted, encoding="utf8")
        console.print(f"Installed {name} in {time.monotonic() - start:.0f} s")
    return folder / "bin" / "python"


def _install(folder: Path, requirements: Path) -> None:
    """Every package is pinned, so pip need not resolve; it goes on where it was interrupted."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    command = [str(python), "-m", "pip", "install", "--no-deps", "--requirement", str(requirements)]
    log = folder / "pip.log"
    with log.open("wb") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=_VARIABLES, check=False
        )
    if done.returncode != 0:
        raise InstallError(f"pip could not install {requirements.name}: see {log}")
