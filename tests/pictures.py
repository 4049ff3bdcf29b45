"""Take the screenshots of the web UI for the README and `docs/ui.md`.

    PYTHONPATH=tests python -m pictures

They show the store of `replaydb ui --demo` in Chromium and are written to `docs/pictures`.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from urllib.parse import quote

from playwright.async_api import ViewportSize
from rich.console import Console

from replaydb.ui import demo
from support.browsing import chromium, serving, tab

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
FOUND = quote('0.2 < reward_mean < 0.8 and tags["level"] == "hard"')
#: Views by the name of their picture, with relative URL and height in pixels.
VIEWS = {
    "overview": ("?buffer=math", 800),
    "groups": (f"groups?buffer=math&where={FOUND}&sort=times_sampled", 720),
    "group": ("group?buffer=math&id=165", 1080),
    "tokens": ("episode?buffer=math&group=165&position=1&show=tokens&by=logprob", 530),
    "step": ("step?buffer=math&step=47", 780),
    "prompt": ("prompt?buffer=math&uid=sums/4", 800),
}


def as_bytes(ids: list[int]) -> str:
    """Decode tokens of the demo store, which are bytes."""
    return bytes(ids).decode("utf8", "replace")


async def main() -> None:
    console = Console()
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/demo.db"
        await demo.fill(url)
        async with (
            chromium() as browser,
            serving(url, decode=as_bytes) as root,
            tab(browser, root) as opened,
        ):
            for name, (address, height) in VIEWS.items():
                page = await opened.open(address)
                await page.set_viewport_size(ViewportSize(width=1280, height=height))
                path = PICTURES / f"{name}.png"
                await page.screenshot(path=path)
                opened.check_quiet()
                console.print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    asyncio.run(main())
