"""Charts of rewards of any size."""

from __future__ import annotations

import asyncio

from playwright.async_api import expect

from replaydb import blocking
from support.browsing import Tab
from support.groups import group


async def test_rewards_of_any_size_are_drawn(live_tab: Tab, url: str) -> None:
    """Superscript exponents on an axis need inline styles, which the content policy forbids."""

    def train() -> None:
        with blocking.Store.open(url, run="far") as store:
            rewards = enumerate((0.0, 1.5e38, 3e38))
            store.buffer("math").put([group(version=i, rewards=[it]) for i, it in rewards])

    await asyncio.to_thread(train)
    for address in ("run?name=far", "?buffer=math"):
        page = await live_tab.open(address)
        await expect(page.locator(".plot").first).to_contain_text("38")
        live_tab.check_quiet()
