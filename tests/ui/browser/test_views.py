"""Accessibility, layout and console of every view: see `Tab.check`."""

from __future__ import annotations

import pytest

from support.browsing import Tab

#: Views with their URLs on the store of `support/sample_store.py`, whose first group has the id 1.
VIEWS = {
    "overview": "?buffer=math",
    "groups": "groups?buffer=math",
    "groups-found": "groups?buffer=math&where=priority+%3C+9&sort=priority&text=script",
    "group": "group?buffer=math&id=61",
    "episode": "episode?buffer=math&group=61&position=0",
    "tokens": "episode?buffer=math&group=67&position=0&show=tokens&by=version",
    "differences": "compare?buffer=math&group=1&a=0&b=1&by=tokens",
    "step": "step?buffer=math&step=2",
    "step-of-runs": "step?buffer=math&step=3",
    "steps": "steps?buffer=math",
    "prompt": "prompt?buffer=math&uid=prompt/1&task=gsm8k",
    "run": "run?name=first",
    "runs": "runs",
    "two-runs": "runs?a=first&b=second",
}


#: Pages of each kind: a list with a form, a group, tokens, a comparison, and a run with charts.
#: Other browser tests open the overview.
KINDS = ("groups-found", "group", "tokens", "differences", "run")


@pytest.mark.parametrize(
    "name",
    [name if name in KINDS else pytest.param(name, marks=pytest.mark.nightly) for name in VIEWS],
)
async def test_a_view_is_accessible(sample_tab: Tab, engine_name: str, name: str) -> None:
    await sample_tab.open(VIEWS[name])
    assert await sample_tab.page.locator("h1").count() == 1
    if engine_name == "sqlite":
        await sample_tab.check(name)
    else:  # the templates are the same on both engines
        sample_tab.check_quiet()
