"""Chromium tabs on the web UI, with checks that every page must pass."""

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

from replaydb.domain.decoding import Decode
from replaydb.ui import application

MISSING = (
    "Chromium is not installed. On Debian: make apt. "
    "On other systems: .venv/bin/playwright install chromium"
)


def find_chromium() -> str | None:
    """Return the path of the system's browser or of the one from Playwright; None without one."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := which(name)) is not None:
            return found
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).is_file() else None


CHROMIUM = find_chromium()
#: Folder of screenshots for visual inspection; git ignores it.
SCREENSHOTS = Path(__file__).resolve().parents[1] / "ui" / "browser" / "screenshots"

# No requests to other hosts. The sandbox of Chromium does not work in a container.
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
#: Pixels of tables that need horizontal scrolling.
_HIDDEN = """Math.max(0, ...[...document.querySelectorAll(".scroll")]
  .filter((it) => it.checkVisibility()).map((it) => it.scrollWidth - it.clientWidth))"""
_CUT = """[...document.querySelectorAll("caption")].filter((it) => it.checkVisibility()
  && it.getBoundingClientRect().right > innerWidth).map((it) => it.textContent)"""
_REACHABLE = (
    "a[href], button, input:not([type=hidden]), select, textarea, summary, [onclick], "
    "[tabindex='0']"
)
#: Record the elements that the Tab key focuses, from the beginning of the page.
_WATCH_FOCUS = """() => { window.focused = new Set(); document.activeElement.blur();
  document.addEventListener("focusin", (event) => window.focused.add(event.target)); }"""
_NEVER_FOCUSED = """(reachable) => [...document.querySelectorAll(reachable)]
  .filter((it) => it.checkVisibility() && !it.disabled && !window.focused.has(it))
  .map((it) => it.outerHTML.slice(0, 200))"""
#: Remove most rows and charts, which are similar, before slow checks.
_SHORTEN = """() => {
  document.querySelectorAll("tbody tr:nth-child(n+4)").forEach((row) => row.remove());
  [...document.querySelectorAll(".plot")].slice(1).forEach((it) => it.style.display = "none"); }"""
_COUNT_REACHABLE = """(reachable) => [...document.querySelectorAll(reachable)]
  .filter((it) => it.checkVisibility() && !it.disabled).length"""


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start a headless browser."""
    async with (
        async_playwright() as playwright,
        await playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS) as browser,
    ):
        yield browser


@asynccontextmanager
async def serving(url: str, *, decode: Decode | None = None) -> AsyncIterator[str]:
    """Serve the web UI of a store, optionally with a tokenizer; yields its URL."""
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
    """A tab of the browser on the web UI, which records errors.

    Attributes:
        page: The Playwright page.
        errors: Errors and warnings on the console, and uncaught exceptions of scripts.
        elsewhere: URLs of requests to other hosts.
    """

    def __init__(self, page: Page, root: str) -> None:
        self.page = page
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self._root = root
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _on_request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.netloc != urlsplit(self._root).netloc:
            self.elsewhere.append(request.url)

    async def open(self, address: str) -> Page:
        """Open a view by its relative URL, such as `groups?buffer=math`."""
        await self.page.goto(f"{self._root}{address}")
        return self.page

    async def follow(self, link: Locator) -> None:
        """Click a link and wait until its page has loaded; a click alone returns earlier."""
        async with self.page.expect_navigation():
            await link.click()

    async def check(self, name: str) -> None:
        """Run all checks on the open view, and take screenshots of it."""
        for scheme in _SCHEMES:
            await self.page.emulate_media(color_scheme=scheme)
            await self.picture(f"{name}-{scheme}")
        await self.page.set_viewport_size(_PHONE)  # type: ignore[arg-type]
        await self.picture(f"{name}-phone")
        await self.check_width()
        await self.page.set_viewport_size(_DESKTOP)  # type: ignore[arg-type]
        await self.check_width()
        await self.page.evaluate(_SHORTEN)
        await self.check_accessible("color-contrast")  # other rules do not depend on colours
        await self.page.emulate_media(color_scheme="light")
        await self.check_accessible()
        await self.check_keyboard()
        self.check_quiet()

    async def check_accessible(self, *rules: str) -> None:
        """Check that Axe finds nothing wrong, by these rules or by all."""
        found = await Axe().run(self.page, options={"runOnly": rules} if rules else None)
        assert not found.response["violations"], found.generate_report()

    async def check_width(self) -> None:
        """Check that neither the page nor, on a desktop, its tables scroll sideways."""
        shown = self.page.viewport_size
        assert shown is not None
        width = await self.page.evaluate(_WIDTH)
        assert width <= shown["width"], f"{width} pixels wide, of {shown['width']}"
        cut = await self.page.evaluate(_CUT)
        assert not cut, f"captions wider than the screen: {cut}"
        if shown["width"] >= _DESKTOP["width"]:
            hidden = await self.page.evaluate(_HIDDEN)
            assert not hidden, f"{hidden} pixels of a table need scrolling"

    async def check_keyboard(self) -> None:
        """Check that the Tab key reaches every interactive element."""
        page = self.page
        if await page.locator("#pause").is_visible():
            await page.click("#pause")  # updates would replace the counted elements
        await page.evaluate(_WATCH_FOCUS)
        for _ in range(await page.evaluate(_COUNT_REACHABLE, _REACHABLE) + 2):
            await page.keyboard.press("Tab")
        never = await page.evaluate(_NEVER_FOCUSED, _REACHABLE)
        assert never == [], f"the Tab key does not reach {never}"

    def check_quiet(self) -> None:
        """Check that there are no console messages and no requests to other hosts."""
        assert self.errors == []
        assert self.elsewhere == []

    async def picture(self, name: str) -> None:
        """Save a screenshot of the full page."""
        SCREENSHOTS.mkdir(exist_ok=True)
        await self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


@asynccontextmanager
async def tab(browser: Browser, root: str) -> AsyncIterator[Tab]:
    """Open an empty tab with its own browser context."""
    context = await browser.new_context(viewport=_DESKTOP)  # type: ignore[arg-type]
    try:
        yield Tab(await context.new_page(), root)
    finally:
        with suppress(Exception):  # the browser may be what failed
            await context.close()
