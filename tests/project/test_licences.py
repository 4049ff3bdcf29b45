"""Licences of all packages that an installation of replaydb brings, with every extra of users."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement

#: Permissive ones.
ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "PSF-2.0",
    "Zlib",
}
#: Older ways to state these.
NAMES = {
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MIT license": "MIT",
}
#: With torch on Linux come NVIDIA's packages, under NVIDIA's terms.
NVIDIA = re.compile(r"(nvidia|cuda)-")
EXTRAS = "analysis", "obstore", "opentelemetry", "prometheus", "report", "ui", "zstd"


def brought() -> dict[str, Distribution]:
    """Return what is installed of the requirements of replaydb, and of theirs."""
    found: dict[str, Distribution] = {}
    asked = [Requirement(f"replaydb[{','.join(EXTRAS)}]")]
    while asked:
        wanted = asked.pop()
        try:
            one = found.setdefault(wanted.name.lower(), distribution(wanted.name))
        except PackageNotFoundError:
            continue  # such as CUDA's packages, where torch is built without them
        for line in one.requires or ():
            requirement = Requirement(line)
            marker = requirement.marker
            if requirement.name.lower() not in found and (
                marker is None
                or any(marker.evaluate({"extra": extra}) for extra in wanted.extras or {""})
            ):
                asked.append(requirement)
    del found["replaydb"]
    return found


def is_permissive(one: Distribution) -> bool:
    """Return whether all licences of a package are allowed, or one of its alternatives."""
    stated = one.metadata.get_all("License-Expression") or []
    if not stated:
        classifiers = one.metadata.get_all("Classifier") or []
        named = [it.rpartition(" :: ")[2] for it in classifiers if it.startswith("License :: ")]
        named = named or one.metadata.get_all("License") or ["none"]
        stated = [NAMES.get(it, it) for it in named]
    terms = re.sub(r"[()]", "", " AND ".join(stated)).split(" AND ")
    return all(ALLOWED & set(term.strip().split(" OR ")) for term in terms)


def test_licences_are_permissive() -> None:
    packages = brought()
    assert packages.keys() >= {"numpy", "sqlalchemy", "torch", "pyarrow", "starlette", "h11"}
    refused = {name for name, one in packages.items() if not is_permissive(one)}
    assert {name for name in refused if not NVIDIA.match(name)} == set()
