"""Finding groups in the browser."""

from __future__ import annotations

from playwright.async_api import Page

from support.browsing import Tab


async def ids(page: Page) -> list[str]:
    return await page.locator("tbody th a").all_inner_texts()


async def test_a_filter_is_entered_by_keyboard_and_is_part_of_the_url(sample_tab: Tab) -> None:
    page = await sample_tab.open("groups?buffer=math")
    everything = await ids(page)
    assert len(everything) == 50
    await page.get_by_label("Filter", exact=True).fill(
        'tags["kind"] == "hard" and reward_mean > 0.2'
    )
    async with page.expect_navigation():
        await page.keyboard.press("Enter")
    await page.get_by_text("Groups that match all of:").wait_for()
    found = await ids(page)
    assert 0 < len(found) < 30
    assert await page.get_by_label("Filter", exact=True).input_value() != ""
    await sample_tab.follow(page.get_by_role("link", name="reward", exact=True))
    heading = page.get_by_role("columnheader", name="reward", exact=False)
    assert await heading.first.get_attribute("aria-sort") == "descending"
    by_reward = await ids(page)
    assert sorted(by_reward) == sorted(found)
    assert by_reward != found
    there = page.url.rpartition("/")[2]
    await page.go_back()
    assert await ids(page) == found
    assert await ids(await sample_tab.open(there)) == by_reward
    await sample_tab.open("groups?buffer=math")
    await sample_tab.follow(page.get_by_role("link", name="Next").first)
    rest = await ids(page)
    assert not set(rest) & set(everything)
    await sample_tab.follow(page.get_by_role("link", name="Previous").first)
    assert await ids(page) == everything
    sample_tab.check_quiet()


async def test_an_invalid_filter_is_refused_with_its_position(sample_tab: Tab) -> None:
    page = await sample_tab.open("groups?buffer=math")
    await page.get_by_label("Filter", exact=True).fill("reward_mean > 0.5 and nothing")
    await sample_tab.follow(page.get_by_role("button", name="Show"))
    assert "'nothing' at character 23" in await page.inner_text("main")
    assert sample_tab.elsewhere == []


async def test_text_from_models_is_escaped(sample_tab: Tab) -> None:
    page = await sample_tab.open("groups?buffer=math&text=script")
    text = await page.inner_text("table")
    assert "<script>document.title = 'run'</script>" in text
    assert await page.title() == "Groups of math · replaydb"
    page = await sample_tab.open("groups?buffer=math&text=red")
    assert "\\x1b[31mred\\x1b[0m" in await page.inner_text("table")
    sample_tab.check_quiet()
