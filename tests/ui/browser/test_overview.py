"""Live updates and layout of the overview."""

from __future__ import annotations

import asyncio

from playwright.async_api import Locator, Page, Request, Route, expect

from replaydb import Store, blocking, operations
from support.browsing import Tab
from support.groups import group

#: Timeout in milliseconds for a busy machine.
LONG = 60_000


def train(url: str, version: int) -> None:
    """Put five more groups, and sample two of them for a step."""
    with blocking.Store.open(url, run="training") as store:
        buffer = store.buffer("math")
        buffer.advance_policy(version)
        buffer.put([group(version=version) for _ in range(5)])
        buffer.sample(2, step=version)


def fact(page: Page, name: str) -> Locator:
    name_itself = page.get_by_text(name, exact=True)
    return page.locator(".facts div").filter(has=name_itself).locator("dd")


async def test_the_overview_is_updated_until_pause(live_tab: Tab, url: str) -> None:
    await asyncio.to_thread(train, url, 1)
    page = live_tab.page
    await page.clock.install()  # runs by itself, and can be advanced
    await live_tab.open("?buffer=math")
    await expect(fact(page, "policy version")).to_have_text("1")
    await page.evaluate("window.isSame = true")
    await asyncio.to_thread(train, url, 2)
    await page.clock.run_for(3000)
    await expect(fact(page, "policy version")).to_have_text("2", timeout=LONG)
    await expect(fact(page, "put")).to_contain_text("10")
    await expect(fact(page, "drawn")).to_contain_text("4")
    draws = page.get_by_role("table", name="Recent draws and their outcomes")
    await expect(draws.get_by_role("link", name="2", exact=True)).to_be_visible()
    assert await page.evaluate("window.isSame"), "the page was reloaded"
    await live_tab.picture("overview-live")

    requested, answered = asyncio.Event(), asyncio.Event()

    async def late(route: Route) -> None:
        requested.set()
        await answered.wait()
        await route.fulfill(body="too late")

    await page.route("**/live?*", late)
    await page.clock.run_for(3000)
    await asyncio.wait_for(requested.wait(), LONG / 1000)
    await page.get_by_role("button", name="Pause").click()
    async with page.expect_event("requestfinished"):
        answered.set()
    requested.clear()
    await asyncio.to_thread(train, url, 3)
    await page.clock.run_for(60_000)
    await expect(page.get_by_text("too late")).to_have_count(0)
    await page.unroute("**/live?*")
    assert not requested.is_set(), "a request was sent while paused"
    await expect(fact(page, "policy version")).to_have_text("2")
    await page.get_by_role("button", name="Pause").click()
    await page.clock.run_for(3000)
    await expect(fact(page, "policy version")).to_have_text("3", timeout=LONG)
    live_tab.check_quiet()


async def test_deleting_the_buffer_stops_the_updates(live_tab: Tab, url: str) -> None:
    await asyncio.to_thread(train, url, 1)
    page = live_tab.page
    await page.clock.install()
    await live_tab.open("?buffer=math")
    async with Store.open(url) as store:
        await operations.delete_buffer(store, "math")
    await page.clock.run_for(20_000)
    problem = page.get_by_text("This buffer was deleted. The data on this page is out of date.")
    await expect(problem).to_be_visible(timeout=LONG)
    requests: list[Request] = []
    page.on("request", lambda request: requests.append(request))
    await page.clock.run_for(60_000)
    assert not requests


async def test_the_first_screen_shows_the_main_facts(sample_tab: Tab) -> None:
    """Blocked calls, reward trend and the last draw are visible without scrolling."""
    page = await sample_tab.open("?buffer=math")
    facts = (
        page.get_by_text("OK: nothing is blocked"),
        page.locator(".trends"),
        fact(page, "last draw"),
        page.get_by_role("img", name="Reward by policy version"),
    )
    for shown in facts:
        await expect(shown).to_be_in_viewport(ratio=1)
    await expect(page.locator(".chart .legend").last).to_be_visible()  # even with a single line
    await page.set_viewport_size({"width": 360, "height": 640})  # a phone, without the charts
    for shown in facts[:-1]:
        await expect(shown).to_be_in_viewport(ratio=1)


async def test_without_scripts_charts_are_tables(sample_tab: Tab) -> None:
    root = (await sample_tab.open("?buffer=math")).url
    browser = sample_tab.page.context.browser
    assert browser is not None
    page = await browser.new_page(java_script_enabled=False)
    await page.goto(root)
    await expect(page.get_by_role("table", name="Reward by policy version")).to_be_visible()
    await expect(page.locator(".plot").first).to_be_hidden()
    await page.close()
