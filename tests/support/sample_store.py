"""Small store with examples of everything that the web UI shows, including hostile texts."""

from __future__ import annotations

from replaydb import Episode, EpisodeGroup, Store
from support.groups import conversation, group

#: Text that a model may generate. It must not be executed or hide the text around it.
HOSTILE = (
    "<script>document.title = 'run'</script>",
    "</script><img src=x onerror=\"document.title = 'run'\">",
    "{{ 7 * 7 }} {% raw %} ${7*7}",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \u202eabc",
    "javascript:alert(1)",
    "x" * 400,
)


async def fill_sample_store(url: str) -> None:
    """Fill a store with a buffer "math", two runs, several tasks, steps and statuses."""
    async with Store.open(url, run="first") as store:
        buffer = await store.buffer("math", max_staleness=20)
        for i in range(60):
            await buffer.put(
                group(
                    f"first-{i}",
                    "gsm8k" if i % 3 else "code",
                    rewards=[i % 5 / 4, i % 3 / 4],
                    version=i // 20,
                    prompt_uid=f"prompt/{i % 12}" if i % 4 else None,
                    tags={"level": i % 3, "kind": "hard" if i % 2 else "easy"},
                )
            )
        for i, text in enumerate(HOSTILE):
            row = Episode(
                prompt_ids=[1, 2],
                response_ids=[3, 4],
                logprobs=[-0.5, -9.0],
                reward=0.5,
                policy_version=2,
                text=text,
                finish_reason=text[:40],
            )
            hostile = EpisodeGroup(
                "<b>task</b>",
                [row],
                prompt=text,
                prompt_uid=text[:60],
                group_uid=f"hostile/{i}",
                tags={text[:60]: text},
            )
            await buffer.put(hostile)
        await buffer.put(
            EpisodeGroup("tools", [conversation(), conversation()], group_uid="conversation")
        )
        await buffer.advance_policy(3)
        for step in (1, 2):
            async with buffer.lease(8, ttl=600, step=step):
                pass
        await buffer.sample(4, step=3)
        await buffer.update_priorities([1, 2, 3], [4.0, 0.0, 2.5])
        async with buffer.lease(1, ttl=600, step=2) as lease:
            await lease.reject(reason="too <long>")
    async with Store.open(url, run="second") as store:
        buffer = await store.buffer("math")
        await buffer.put(group("second-0", rewards=[None, 1.0], version=3, prompt_uid="prompt/1"))
        await buffer.open_group("gsm8k", expected_episodes=4, group_uid="pending")
        await buffer.lease(2, ttl=86_400, step=3)
