"""What every view is to be, whoever looks: see `Tab.check`."""

from __future__ import annotations

import pytest

from support.browsing import Tab

#: Each with its address over the store of `support/exhibits.py`, whose first group has the id 1.
VIEWS = {
    "overview": "",
    "overview-of-a-buffer": "?buffer=math",
    "groups": "groups?buffer=math",
    "groups-found": "groups?buffer=math&where=priority+%3C+9&sort=priority&text=script",
}


@pytest.mark.parametrize("name", VIEWS)
async def test_a_view_is_for_everybody(exhibited: Tab, engine_name: str, name: str) -> None:
    await exhibited.open(VIEWS[name])
    await exhibited.check(f"{name}-{engine_name}")
    assert await exhibited.page.locator("h1").count() == 1
