"""The console's lists of sessions, standing queries and receipts in Chromium."""

from __future__ import annotations

import pytest

from memstream import Filter, Observation
from tests.toolchains.console.conftest import Visit

pytestmark = [pytest.mark.toolchain, pytest.mark.asyncio(loop_scope="session")]
HOSTILE = "<img src=x onerror=alert(1)>\u202e"


async def test_sessions_are_listed_and_link_to_the_timeline(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/lists-sessions")
    names = [*(f"day {number:03d}" for number in range(101)), HOSTILE]
    await memory.observe_batch([Observation(f"said in {each}", session=each, speaker=HOSTILE) for each in names])
    page = await visit.sign_in("m/shop/lists-sessions/sessions", key="reader")
    rows = page.locator("tbody tr")
    assert await rows.count() == 100
    await page.get_by_role("button", name="Next").click()
    await page.get_by_text("101 to 102", exact=True).wait_for()
    await page.get_by_label("Name begins with").fill("<img")
    await page.get_by_role("button", name="Show").click()
    await page.get_by_text("1 to 1", exact=True).wait_for()
    link = rows.get_by_role("link")
    assert await link.text_content() == "<img src=x onerror=alert(1)>⟨U+202E⟩"
    await link.click()
    await page.locator(".timeline li").wait_for()
    assert await page.locator(".timeline li").count() == 1


async def test_standing_queries_appear_and_leave(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/lists-queries")
    text = HOSTILE + "x" * 60_000
    page = await visit.sign_in("m/shop/lists-queries/queries")
    await page.get_by_text("No standing query is open.").wait_for()
    async with memory.recall(session="monday") as stream, stream.subscribe(text, filter=Filter(speakers=["Joy"])):
        row = page.locator("tbody tr")
        await row.wait_for()
        await row.get_by_text("speakers: Joy").wait_for()
        await row.get_by_text("key:root").wait_for()
        await row.get_by_role("button", name="show all").click()
        results = row.locator("td").last
        assert await results.text_content() == "0"
        await memory.observe_batch([Observation("Joy said x", speaker="Joy")])
        await row.locator("td:last-child", has_text="1").wait_for()
        assert await row.get_by_role("button", name="show less").count() == 1, "a refresh keeps what is open"
    await page.get_by_text("No standing query is open.").wait_for()


async def test_receipt_is_shown_with_its_replay(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/lists-receipts")
    page = await visit.sign_in("m/shop/lists-receipts/receipts", key="reader")
    await page.get_by_text("No receipt is kept").wait_for()
    done = await memory.observe_batch(["Bob drinks green tea.", HOSTILE])
    answer = await memory.recall_once("green tea", receipt=True)
    await visit.go("m/shop/lists-receipts")
    await visit.go("m/shop/lists-receipts/receipts")
    await page.get_by_role("link", name=answer.receipt_id).click()
    await page.get_by_text("has the same ranking").wait_for()
    sides = page.locator(".columns section")
    assert [await side.locator("li").count() for side in await sides.all()] == [len(answer), len(answer)]
    await sides.first.get_by_text("Bob drinks green tea.").wait_for()
    operation = await memory.erase_fragments([done.outcomes[0].fragment_id])
    await visit.console.client.finished(operation)
    await visit.go("m/shop/lists-receipts")
    await visit.go(f"m/shop/lists-receipts/receipts/{answer.receipt_id}")
    await page.get_by_text("does not have the same ranking").wait_for()
    await sides.first.get_by_text("erased", exact=True).wait_for()
    await page.get_by_text("query-erased").wait_for()
