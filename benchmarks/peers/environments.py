"""Virtual environments of peers, created once: `.venv/peers/NAME`."""

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
# The version pins of this project do not apply to peers.
_VARIABLES = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}


class InstallError(Exception):
    """pip failed; the message names the file with its output."""


def python_of(name: str | None, console: Console) -> Path:
    """Return the interpreter of an environment, which is created or completed if necessary."""
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
    """Install pinned packages without dependency resolution; resumes an interrupted install."""
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
