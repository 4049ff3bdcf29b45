"""Smoke test with the lowest dependency versions of pyproject.toml, on both engines.

    PYTHONPATH=tests python -m lowest [--torch]

In `.venv/lowest`, direct dependencies are installed at their lowest versions, indirect ones at the
versions of constraints.txt, and the package as a wheel. torch is too large to install twice and is
used from the current environment, except with `--torch`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

from rich.console import Console

from support.postgres import running_server

CHECKOUT = Path(__file__).resolve().parents[2]
ENVIRONMENT = CHECKOUT / ".venv" / "lowest"
#: Pinned for developers' tools, and limited by a lowest version (opentelemetry-api).
LIMITED = {"importlib-metadata"}
#: Extras that only developers need.
NOT_TESTED = {"bench", "dev", "docs"}
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)")


def lowest_versions(borrowed: set[str]) -> list[str]:
    """Return direct dependencies of the package and its extras, but these, as NAME==VERSION."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra, requirements in project["optional-dependencies"].items():
        wanted += requirements if extra not in NOT_TESTED else []
    pins = []
    for requirement in dict.fromkeys(wanted):
        match = _REQUIREMENT.fullmatch(requirement)
        assert match, f"{requirement} has no lowest version"
        if match[1] not in borrowed:
            pins.append(f"{match[1]}=={match[2]}")
    return pins


def install(pins: list[str]) -> Path:
    """Return the interpreter of an environment with these packages; recreate it if they changed."""
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / "installed.txt"
    wanted = "\n".join([sys.version, *pins])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    subprocess.run(
        [sys.executable, "-m", "venv", "--clear", "--without-pip", ENVIRONMENT], check=True
    )
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--python", str(python), "install", *pins],
        check=True,
        env=os.environ | {"PIP_CONSTRAINT": str(_other_constraints(pins))},
    )
    # Paths in .pth files are searched last, so these packages do not replace installed ones.
    (site_packages,) = ENVIRONMENT.glob("lib/python*/site-packages")
    (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    stamp.write_text(wanted)
    return python


def install_wheel(python: Path, folder: str) -> None:
    """Build the package from this checkout and install it."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder]
    subprocess.run([*build, CHECKOUT], check=True, stdout=subprocess.DEVNULL)
    (wheel,) = Path(folder).glob("*.whl")
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
    again = ["install", "--no-deps", "--force-reinstall"]
    subprocess.run([*pip, "--python", str(python), *again, wheel], check=True)


def _other_constraints(pins: list[str]) -> Path:
    """Write constraints.txt without the packages that are pinned to other versions."""
    names = {_normal(pin) for pin in pins} | LIMITED
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    path = ENVIRONMENT / "constraints.txt"
    path.write_text("\n".join(line for line in lines if _normal(line) not in names))
    return path


def _normal(pin: str) -> str:
    return pin.partition("==")[0].lower().replace("_", "-")


def main() -> None:
    console = Console()
    pins = lowest_versions(borrowed=set() if sys.argv[1:] == ["--torch"] else {"torch"})
    with console.status(f"Installing {len(pins)} packages"):
        python = install(pins)
    console.print(f"Lowest versions: {', '.join(pins)}")
    with running_server() as server, tempfile.TemporaryDirectory() as folder:
        install_wheel(python, folder)
        urls = [f"sqlite:///{folder}/smoke.db", server.create_database("lowest")]
        for url in urls:
            engine = url.partition(":")[0]
            with console.status(engine):
                subprocess.run(
                    [python, "-P", Path(__file__).with_name("smoke.py"), url, *pins],
                    check=True,
                    env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                )
            console.print(
                f"{engine}: put, sample, lease, wait, migrate, the commands and the pages work"
            )


if __name__ == "__main__":
    main()
