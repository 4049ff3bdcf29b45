"""A real browser on the pages, and what each of them has to meet in it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from shutil import which
from typing import Literal
from urllib.parse import urlsplit

import uvicorn
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import (
    Browser,
    ConsoleMessage,
    Locator,
    Page,
    Request,
    async_playwright,
)
from playwright.sync_api import sync_playwright

from replaydb.decoding import Decode
from replaydb.ui import application

MISSING = (
    "Chromium is not installed. On Debian: make browser. "
    "On other systems: .venv/bin/playwright install chromium"
)


def find_chromium() -> str | None:
    """The browser of the system, or that which playwright has downloaded; None without one."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := which(name)) is not None:
            return found
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).is_file() else None


CHROMIUM = find_chromium()
#: What pages looked like, to be looked at; git ignores it.
SCREENSHOTS = Path(__file__).resolve().parents[1] / "ui" / "browser" / "screenshots"

# Chromium is to talk to nobody else; in a container its sandbox does not work.
_ARGUMENTS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    "--no-sandbox",
)
_SCHEMES: tuple[Literal["light"], Literal["dark"]] = ("light", "dark")
_DESKTOP = {"width": 1280, "height": 900}
_PHONE = {"width": 360, "height": 740}
_WIDTH = "document.scrollingElement.scrollWidth"
#: Pixels of tables that are to be scrolled to.
_HIDDEN = """Math.max(0, ...[...document.querySelectorAll(".scroll")]
  .filter((it) => it.checkVisibility()).map((it) => it.scrollWidth - it.clientWidth))"""
_CUT = """[...document.querySelectorAll("caption")].filter((it) => it.checkVisibility()
  && it.getBoundingClientRect().right > innerWidth).map((it) => it.textContent)"""
_REACHABLE = (
    "a[href], button, input:not([type=hidden]), select, textarea, summary, [onclick], "
    "[tabindex='0']"
)
#: What `Tab` comes to, counted from the beginning of the page; and what it has to come to.
_WATCH_FOCUS = """() => { window.focused = new Set(); document.activeElement.blur();
  document.addEventListener("focusin", (event) => window.focused.add(event.target)); }"""
_NEVER_FOCUSED = """(reachable) => [...document.querySelectorAll(reachable)]
  .filter((it) => it.checkVisibility() && !it.disabled && !window.focused.has(it))
  .map((it) => it.outerHTML.slice(0, 200))"""
#: Rows of a table are alike, and so are charts: a few are enough for what takes long.
_SHORTEN = """() => {
  document.querySelectorAll("tbody tr:nth-child(n+4)").forEach((row) => row.remove());
  [...document.querySelectorAll(".plot")].slice(1).forEach((it) => it.style.display = "none"); }"""
_COUNT_REACHABLE = """(reachable) => [...document.querySelectorAll(reachable)]
  .filter((it) => it.checkVisibility() && !it.disabled).length"""


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser that nobody sees."""
    async with (
        async_playwright() as playwright,
        await playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS) as browser,
    ):
        yield browser


@asynccontextmanager
async def serving(url: str, *, decode: Decode | None = None) -> AsyncIterator[str]:
    """The pages over a store, by HTTP, and what decodes its tokens; where they are."""
    app = application(url)
    config = uvicorn.Config(app, lifespan="off", log_level="warning", ws="none")
    server = uvicorn.Server(config)
    async with app.router.lifespan_context(app):
        app.state.decode = decode
        with socket.create_server(("127.0.0.1", 0)) as listener:
            task = asyncio.create_task(server.serve([listener]))
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
            server.should_exit = True
            await task


class Tab:
    """A tab of the browser on the pages, which notes what goes wrong in it.

    Attributes:
        page: As Playwright has it.
        errors: What was written to the console as an error, or raised in a script.
        elsewhere: Requests to other hosts.
    """

    def __init__(self, page: Page, root: str) -> None:
        self.page = page
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self._root = root
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._asked)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _asked(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.netloc != urlsplit(self._root).netloc:
            self.elsewhere.append(request.url)

    async def open(self, address: str) -> Page:
        """Go to a view: `groups?buffer=math`."""
        await self.page.goto(f"{self._root}{address}")
        return self.page

    async def follow(self, link: Locator) -> None:
        """Click, and wait for all of the page that it leads to: a click alone returns before."""
        async with self.page.expect_navigation():
            await link.click()

    async def check(self, name: str) -> None:
        """See that the view that is open is what every view is to be, and take its picture."""
        for scheme in _SCHEMES:
            await self.page.emulate_media(color_scheme=scheme)
            await self.picture(f"{name}-{scheme}")
        await self.page.set_viewport_size(_PHONE)  # type: ignore[arg-type]
        await self.picture(f"{name}-phone")
        await self.check_width()
        await self.page.set_viewport_size(_DESKTOP)  # type: ignore[arg-type]
        await self.check_width()
        await self.page.evaluate(_SHORTEN)
        await self.check_accessible("color-contrast")  # in the dark; other rules see no colours
        await self.page.emulate_media(color_scheme="light")
        await self.check_accessible()
        await self.check_keyboard()
        self.check_quiet()

    async def check_accessible(self, *rules: str) -> None:
        """Check that Axe finds nothing wrong, by these rules or by all."""
        found = await Axe().run(self.page, options={"runOnly": rules} if rules else None)
        assert not found.response["violations"], found.generate_report()

    async def check_width(self) -> None:
        """It scrolls down only, and so do its tables where there is room for them; captions fit."""
        shown = self.page.viewport_size
        assert shown is not None
        width = await self.page.evaluate(_WIDTH)
        assert width <= shown["width"], f"{width} pixels wide, of {shown['width']}"
        cut = await self.page.evaluate(_CUT)
        assert not cut, f"captions that go on beyond the screen: {cut}"
        if shown["width"] >= _DESKTOP["width"]:
            hidden = await self.page.evaluate(_HIDDEN)
            assert not hidden, f"{hidden} pixels of a table are to be scrolled to"

    async def check_keyboard(self) -> None:
        """`Tab` gets to everything that a mouse gets to."""
        page = self.page
        if await page.locator("#pause").is_visible():
            await page.click("#pause")  # what is counted is not to be replaced meanwhile
        await page.evaluate(_WATCH_FOCUS)
        for _ in range(await page.evaluate(_COUNT_REACHABLE, _REACHABLE) + 2):
            await page.keyboard.press("Tab")
        never = await page.evaluate(_NEVER_FOCUSED, _REACHABLE)
        assert never == [], f"Tab never comes to {never}"

    def check_quiet(self) -> None:
        """Nothing in the console, and no request to another host."""
        assert self.errors == []
        assert self.elsewhere == []

    async def picture(self, name: str) -> None:
        """Take a picture of all of the page that is open, to be looked at."""
        SCREENSHOTS.mkdir(exist_ok=True)
        await self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


@asynccontextmanager
async def tab(browser: Browser, root: str) -> AsyncIterator[Tab]:
    """A tab of its own, with nothing open."""
    context = await browser.new_context(viewport=_DESKTOP)  # type: ignore[arg-type]
    try:
        yield Tab(await context.new_page(), root)
    finally:
        with suppress(Exception):  # the browser may be what failed
            await context.close()
