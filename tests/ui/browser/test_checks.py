"""The checks of `Tab` detect faulty pages."""

from __future__ import annotations

import pytest

from support.browsing import Tab

GOOD = """<!doctype html><html lang="en"><title>t</title><main><h1>t</h1>{}</main></html>"""


@pytest.mark.parametrize("engine_name", ["sqlite"])
async def test_faulty_pages_are_detected(sample_tab: Tab) -> None:
    page = sample_tab.page
    await page.route("http://elsewhere.test/**", lambda route: route.abort())
    checks = (sample_tab.check_accessible, sample_tab.check_width, sample_tab.check_keyboard)
    await page.set_content(GOOD.format("<a href='/'>home</a>"))
    for check in checks:
        await check()
    sample_tab.check_quiet()
    wide = "<p style='width: 3000px'>wide</p>"
    for wrong, check in {
        "<p style='color: #ddd; background: #fff'>low contrast</p>": checks[0],
        wide: checks[1],
        f"<div class='scroll' style='overflow-x: auto'>{wide}</div>": checks[1],
        "<div style='overflow-x: auto'><table><caption>cut</caption><tr><td>"
        f"{wide}</table></div>": checks[1],
        "<span onclick='0'>only for a mouse</span>": checks[2],
    }.items():
        await page.set_content(GOOD.format(wrong))
        with pytest.raises(AssertionError):
            await check()
    await page.set_content(GOOD.format("<img alt='' src='http://elsewhere.test/pixel.gif'>"))
    assert sample_tab.elsewhere == ["http://elsewhere.test/pixel.gif"]
    assert len(sample_tab.errors) == 1
    with pytest.raises(AssertionError):
        sample_tab.check_quiet()
