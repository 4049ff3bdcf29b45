"""`replaydb leases`: tables and JSON."""

from __future__ import annotations

import asyncio

from replaydb import Store
from support.command import json_of, rows_of, run
from support.engines import both_engines


def test_leases_are_listed_and_shown(filled_url: str) -> None:
    (listed,) = json_of("leases", "list", "math", "--owner", "trainer-0", url=filled_url)
    assert (listed["step"], len(listed["group_ids"])) == (8, 1)
    assert json_of("leases", "list", "math", "--owner", "nobody", url=filled_url) == []
    words = [str(listed["id"]), "trainer-0", "8", "1", str(listed["group_ids"][0])]
    assert words in [row[:5] for row in rows_of(run("leases", "list", "math", url=filled_url))]
    shown = json_of("leases", "show", "math", listed["id"], url=filled_url)
    assert shown["lease"] == listed
    assert [one["group_uid"] for one in shown["groups"]] == ["uid-5"]
    table = rows_of(run("leases", "show", "math", listed["id"], url=filled_url))
    assert ["owner", "trainer-0"] in table
    assert [str(listed["group_ids"][0]), "odd", "p2", "2", "10", "5.5"] in [r[:6] for r in table]


def test_leases_are_sorted(filled_url: str) -> None:
    async def lease() -> None:
        async with Store.open(filled_url) as store:
            buffer = await store.buffer("math")
            await buffer.lease(2, ttl=60, owner="a", step=9)
            await buffer.lease(1, ttl=6000, owner="b")

    def owners(*words: str) -> list[str]:
        return [one["owner"] for one in json_of("leases", "list", "math", *words, url=filled_url)]

    asyncio.run(lease())
    assert owners() == ["b", "a", "trainer-0"]
    assert owners("--ascending") == ["trainer-0", "a", "b"]
    assert owners("--sort", "expires_at") == ["b", "trainer-0", "a"]
    assert owners("--sort", "step", "--ascending") == ["trainer-0", "a", "b"]
    assert owners("--sort", "num_groups")[0] == "a"


@both_engines
def test_a_lease_is_revoked(filled_url: str) -> None:
    (listed,) = json_of("leases", "list", "math", url=filled_url)
    words = ("leases", "revoke", "math", listed["id"])
    assert run(*words, "--reason", "stuck", url=filled_url).output == "returned 1 groups\n"
    assert run(*words, url=filled_url).output == f"lease {listed['id']} has no groups\n"
    assert json_of("leases", "list", "math", url=filled_url) == []
    group = json_of("groups", "show", "math", "uid-5", url=filled_url)["group"]
    assert (group["status"], group["status_reason"]) == ("completed", "revoked: stuck")
    outcome = run("leases", "show", "math", listed["id"], url=filled_url)
    assert outcome.exit_code == 1
    assert "has expired or has ended" in outcome.stderr
