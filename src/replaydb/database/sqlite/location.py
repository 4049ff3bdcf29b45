"""Paths at which SQLite would lose commits."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "fuse.sshfs",
                        "fuse.glusterfs", "glusterfs", "lustre", "beegfs", "gpfs"}  # fmt: skip


def hazard(path: Path) -> str | None:
    """Return why SQLite would lose commits at a path and what to do; None if it would not.

    WAL needs shared memory, which network filesystems do not provide, and connections that open the
    file by the same path, beside which SQLite keeps the -wal file.
    """
    resolved = Path(os.path.realpath(path))  # does not fail on a loop of links
    point, kind = _mount_of(resolved)
    if kind in _NETWORK_FILESYSTEMS:
        return (
            f"it is on a network filesystem ({kind}), where SQLite loses data; use a local disk, "
            "or PostgreSQL to share a store between machines"
        )
    if os.path.isdir(resolved):
        return None  # opening it fails
    if point == resolved:
        return (
            "it is mounted as a single file, so the newest commits, which are in the -wal file "
            "beside it, would not be in the mount; mount its folder instead"
        )
    with suppress(OSError):
        if (names := os.stat(resolved).st_nlink) > 1:
            return (
                f"it has {names} names (hard links), and the newest commits would be in a -wal "
                "file beside only one of them; remove the other names, or open a copy"
            )
    return None


def _mount_of(resolved: Path) -> tuple[Path | None, str | None]:
    """Return mount point and type of the filesystem of a path; None if mounts are not listed."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf8").splitlines()
    except OSError:
        return None, None
    best: tuple[Path | None, str | None] = None, None
    depth = -1
    for mount in mounts:
        _, point, filesystem, *_ = mount.split(" ")
        at = Path(point.replace("\\040", " "))
        if resolved.is_relative_to(at) and len(at.parts) > depth:
            best, depth = (at, filesystem), len(at.parts)
    return best
