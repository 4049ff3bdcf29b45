"""The overview follows a training, as long as it is not told to pause."""

from __future__ import annotations

import asyncio

from playwright.async_api import Locator, Page, Request, Route, expect

from replaydb import Store, blocking, operations
from support.browsing import Tab
from support.groups import group

#: Milliseconds for what a busy machine takes.
LONG = 60_000


def train(url: str, version: int) -> None:
    """Five groups more, and a step on two of them."""
    with blocking.Store.open(url, run="training") as store:
        buffer = store.buffer("math")
        buffer.advance_policy(version)
        buffer.put([group(version=version) for _ in range(5)])
        buffer.sample(2, step=version)


def fact(page: Page, name: str) -> Locator:
    name_itself = page.get_by_text(name, exact=True)
    return page.locator(".facts div").filter(has=name_itself).locator("dd")


async def test_it_follows_a_training_until_pause(looked_at: Tab, url: str) -> None:
    await asyncio.to_thread(train, url, 1)
    page = looked_at.page
    await page.clock.install()  # it goes on by itself, and can be put forward
    await looked_at.open("?buffer=math")
    await expect(fact(page, "policy version")).to_have_text("1")
    await page.evaluate("window.isSame = true")
    await asyncio.to_thread(train, url, 2)
    await expect(fact(page, "policy version")).to_have_text("2", timeout=LONG)
    await expect(fact(page, "generated")).to_contain_text("10")
    await expect(fact(page, "drawn")).to_contain_text("4")
    draws = page.get_by_role("table", name="What was drawn last")
    await expect(draws.get_by_role("link", name="2", exact=True)).to_be_visible()
    assert await page.evaluate("window.isSame"), "it was loaded anew"
    await looked_at.picture("overview-that-follows")

    asked, answered = asyncio.Event(), asyncio.Event()

    async def late(route: Route) -> None:
        asked.set()
        await answered.wait()
        await route.fulfill(body="too late")

    await page.route("**/live?*", late)
    await page.clock.run_for(3000)
    await asyncio.wait_for(asked.wait(), LONG / 1000)
    await page.get_by_role("button", name="Pause").click()
    async with page.expect_event("requestfinished"):
        answered.set()
    asked.clear()
    await asyncio.to_thread(train, url, 3)
    await page.clock.run_for(60_000)
    await expect(page.get_by_text("too late")).to_have_count(0)
    await page.unroute("**/live?*")
    assert not asked.is_set(), "it asks while it is to pause"
    await expect(fact(page, "policy version")).to_have_text("2")
    await page.get_by_role("button", name="Pause").click()
    await expect(fact(page, "policy version")).to_have_text("3", timeout=LONG)
    looked_at.check_quiet()


async def test_a_buffer_is_deleted_meanwhile(looked_at: Tab, url: str) -> None:
    await asyncio.to_thread(train, url, 1)
    page = looked_at.page
    await page.clock.install()
    await looked_at.open("?buffer=math")
    async with Store.open(url) as store:
        await operations.delete_buffer(store, "math")
    await page.clock.run_for(20_000)
    problem = page.get_by_text("This buffer is not there any more: what is shown is old.")
    await expect(problem).to_be_visible(timeout=LONG)
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request))
    await page.clock.run_for(60_000)
    assert not asked


async def test_the_first_screen_answers_what_is_asked(exhibited: Tab) -> None:
    """Is it learning, is anything stuck, what was just trained: without scrolling."""
    page = await exhibited.open("?buffer=math")
    answers = (
        page.get_by_text("Nobody waits."),
        page.locator(".trends"),
        fact(page, "last draw"),
        page.get_by_role("img", name="Reward by policy version"),
    )
    for answer in answers:
        await expect(answer).to_be_in_viewport(ratio=1)
    await expect(page.locator(".chart .legend").last).to_be_visible()  # of one line only as well
    await page.set_viewport_size({"width": 360, "height": 640})  # of a phone, without charts
    for answer in answers[:-1]:
        await expect(answer).to_be_in_viewport(ratio=1)


async def test_without_scripts_charts_are_tables(exhibited: Tab) -> None:
    root = (await exhibited.open("?buffer=math")).url
    browser = exhibited.page.context.browser
    assert browser is not None
    page = await browser.new_page(java_script_enabled=False)
    await page.goto(root)
    await expect(page.get_by_role("table", name="Reward by policy version")).to_be_visible()
    await expect(page.locator(".plot").first).to_be_hidden()
    await page.close()
