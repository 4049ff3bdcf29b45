"""Charts draw whatever rewards there were."""

from __future__ import annotations

import asyncio

from playwright.async_api import expect

from replaydb import blocking
from support.browsing import Tab
from support.groups import group


async def test_rewards_of_any_size_are_drawn(looked_at: Tab, url: str) -> None:
    """An axis with raised exponents writes styles into the page, which is not let."""

    def train() -> None:
        with blocking.Store.open(url, run="far") as store:
            rewards = enumerate((0.0, 1.5e38, 3e38))
            store.buffer("math").put([group(version=i, rewards=[it]) for i, it in rewards])

    await asyncio.to_thread(train)
    for address in ("run?name=far", "?buffer=math"):
        page = await looked_at.open(address)
        await expect(page.locator(".plot").first).to_contain_text("38")
        looked_at.check_quiet()
