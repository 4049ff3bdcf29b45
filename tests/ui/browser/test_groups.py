"""Finding groups, as a person does it."""

from __future__ import annotations

from playwright.async_api import Page

from support.browsing import Tab


async def ids(page: Page) -> list[str]:
    return await page.locator("tbody th a").all_inner_texts()


async def test_groups_are_found_by_keyboard_and_sent_as_an_address(exhibited: Tab) -> None:
    page = await exhibited.open("groups?buffer=math")
    everything = await ids(page)
    assert len(everything) == 50
    await page.get_by_label("Filter", exact=True).fill(
        'tags["kind"] == "hard" and reward_mean > 0.2'
    )
    async with page.expect_navigation():
        await page.keyboard.press("Enter")
    await page.get_by_text("Groups of which all of this is true").wait_for()
    found = await ids(page)
    assert 0 < len(found) < 30
    assert await page.get_by_label("Filter", exact=True).input_value() != ""
    await exhibited.follow(page.get_by_role("link", name="reward", exact=True))
    heading = page.get_by_role("columnheader", name="reward", exact=False)
    assert await heading.first.get_attribute("aria-sort") == "descending"
    by_reward = await ids(page)
    assert sorted(by_reward) == sorted(found)
    assert by_reward != found
    there = page.url.rpartition("/")[2]
    await page.go_back()
    assert await ids(page) == found
    assert await ids(await exhibited.open(there)) == by_reward
    await exhibited.open("groups?buffer=math")
    await exhibited.follow(page.get_by_role("link", name="Next").first)
    rest = await ids(page)
    assert not set(rest) & set(everything)
    await exhibited.follow(page.get_by_role("link", name="Previous").first)
    assert await ids(page) == everything
    exhibited.check_quiet()


async def test_a_wrong_filter_is_answered_with_its_place(exhibited: Tab) -> None:
    page = await exhibited.open("groups?buffer=math")
    await page.get_by_label("Filter", exact=True).fill("reward_mean > 0.5 and nothing")
    await exhibited.follow(page.get_by_role("button", name="Show"))
    assert "'nothing' at character 23" in await page.inner_text("main")
    assert exhibited.elsewhere == []


async def test_what_a_model_wrote_is_shown_and_not_run(exhibited: Tab) -> None:
    page = await exhibited.open("groups?buffer=math&text=script")
    text = await page.inner_text("table")
    assert "<script>document.title = 'run'</script>" in text
    assert await page.title() == "Groups of math · replaydb"
    page = await exhibited.open("groups?buffer=math&text=red")
    assert "\\x1b[31mred\\x1b[0m" in await page.inner_text("table")
    exhibited.check_quiet()
