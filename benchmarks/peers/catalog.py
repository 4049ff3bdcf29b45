"""Catalog of the stores that are compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """A store.

    Attributes:
        name: Name on the command line and in tables.
        module: Its module in `benchmarks.peers.adapters`.
        adapter: Its class in that module.
        environment: Name of its requirements file; None: it runs in this environment.
    """

    name: str
    module: str
    adapter: str = "Adapter"
    environment: str | None = None


PEERS = {
    peer.name: peer
    for peer in (
        Peer("list", "plain"),
        Peer("replaydb-sqlite", "replaydb"),
        Peer("replaydb-sqlite-files", "replaydb", "Files"),
        Peer("replaydb-postgresql", "replaydb", "Postgresql"),
        Peer("dm-reverb", "dm_reverb", environment="dm-reverb"),
        Peer("dm-reverb-in-process", "dm_reverb", "InProcess", environment="dm-reverb"),
        Peer("torchrl", "torchrl", environment="torchrl"),
        Peer("cpprb", "cpprb", environment="cpprb"),
        Peer("trinity-rft", "trinity", environment="trinity-rft"),
        Peer("transfer-queue", "transfer_queue", environment="transfer-queue"),
        Peer("trl", "trl", environment="trl"),
    )
}
