"""Compare replaydb with other stores, on the same groups, each store in its own process."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.peers.catalog import PEERS, Peer
from benchmarks.peers.crash import crash
from benchmarks.peers.environments import InstallError, python_of
from benchmarks.peers.findings import Finding
from benchmarks.peers.groups import SHAPES
from benchmarks.peers.processes import WorkerError
from benchmarks.peers.race import Contender, Load, loads
from benchmarks.peers.report import to_json, to_tables

Pythons = dict[Peer, Path]


class Run:
    """A comparison in progress. A peer that fails is excluded; the others continue."""

    def __init__(self, console: Console, groups: int) -> None:
        self._console = console
        self._groups = groups
        self._excluded: set[str] = set()
        self.findings: list[Finding] = []

    @property
    def failed(self) -> bool:
        """Whether any peer failed."""
        return bool(self._excluded)

    def environments(self, peers: list[Peer]) -> Pythons:
        """Return the interpreter of each peer, whose environment is installed if necessary."""
        pythons = {}
        for peer in peers:
            try:
                pythons[peer] = python_of(peer.environment, self._console)
            except InstallError as error:
                self._exclude(peer.name, str(error))
        return pythons

    def race(self, pythons: Pythons, load: Load, rounds: int) -> None:
        """Measure all peers in each round, so that noise affects all of them alike."""
        with ExitStack() as stack:
            contenders = [
                Contender(peer, load, python, _folder(stack), stack)
                for peer, python in pythons.items()
            ]
            for one in track(contenders, f"Filling, {load.size}", console=self._console):
                self._attempt(one.name, partial(one.start, rounds))
            for number in track(range(rounds + 1), f"Rounds, {load.size}", console=self._console):
                for one in contenders[:: 1 if number % 2 else -1]:
                    self._attempt(one.name, partial(one.round, counts=number > 0))
            for one in contenders:
                self._attempt(one.name, partial(self.findings.extend, one.findings()))

    def crash(self, pythons: Pythons) -> None:
        """Measure recovery after SIGKILL, one peer after another."""
        for peer, python in track(pythons.items(), "Crashes", console=self._console):
            with ExitStack() as stack:
                lost = crash(peer, python, _folder(stack), self._groups)
                self._attempt(peer.name, partial(self.findings.extend, lost))

    def _attempt(self, name: str, work: Callable[[], object]) -> None:
        if name in self._excluded:
            return
        try:
            work()
        except WorkerError as error:
            self._exclude(name, str(error))

    def _exclude(self, name: str, reason: str) -> None:
        self._console.print(reason, markup=False)
        self._excluded.add(name)
        self.findings.append(Finding(name, "failed", None, note=reason.splitlines()[0]))


def _folder(stack: ExitStack) -> Path:
    made = tempfile.TemporaryDirectory(prefix="replaydb-peers-", ignore_cleanup_errors=True)
    return Path(stack.enter_context(made))


def main() -> None:
    """Parse arguments, measure, and print the findings."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument(
        "--peers", nargs="+", choices=PEERS, default=list(PEERS), help="stores (default: all)"
    )
    parser.add_argument(
        "--groups",
        type=int,
        default=1000,
        help="groups of 72 KB in each store before measurements (default: %(default)s)",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        choices=SHAPES,
        default=list(SHAPES),
        help="group sizes (default: all)",
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="number of rounds (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="also write the findings to this file")
    arguments = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 150)
    run = Run(console, arguments.groups)
    pythons = run.environments([PEERS[name] for name in arguments.peers])
    for size in arguments.sizes:
        run.race(pythons, loads(arguments.groups)[size], arguments.rounds)
    run.crash(pythons)
    console.print(to_tables(run.findings, arguments.groups))
    if arguments.json is not None:
        text = json.dumps(to_json(run.findings, arguments.groups), indent=2)
        arguments.json.write_text(text, encoding="utf8")
    sys.exit(1 if run.failed else 0)


if __name__ == "__main__":
    main()
