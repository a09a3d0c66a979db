"""The console's lists of sessions, standing queries and receipts in Chromium."""

from __future__ import annotations

import pytest

from memstream import Filter, NewMessage, Observation
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


async def test_conversations_of_a_namespace_are_listed(visit: Visit) -> None:
    client = visit.console.client
    await client.create_memory("talks/memory")
    await client.conversation("talks/plans").append("ann", "hello")
    await client.conversation("talks/plans").complete()
    await client.conversation("talks/today").append("ann", "good morning")
    page = await visit.sign_in("conversations/talks")
    assert await page.locator("tbody th").all_text_contents() == ["plans", "today"]
    assert await page.locator("tbody .mark").all_text_contents() == ["completed", "open"]
    await page.get_by_role("link", name="today").click()
    await page.locator(".timeline li", has_text="good morning").wait_for()


async def test_conversations_are_searched_and_deleted(visit: Visit) -> None:
    client = visit.console.client
    await client.create_memory("sessions/notes")
    for name, user in (("run-1", "ann"), ("run-2", "bob"), ("other", "bob")):
        talk = client.conversation(f"sessions/{name}")
        await talk.append_messages([NewMessage(role="user", body='{"said": "hello there"}')])
        await talk.update(labels={"user": user}, feed_memory="notes")
    page = await visit.sign_in("conversations/sessions")
    await page.get_by_label("Name begins with").fill("run")
    await page.get_by_label("Label").fill("user=bob")
    await page.get_by_role("button", name="Show").click()
    await page.get_by_role("row", name="run-1").wait_for(state="detached")
    assert await page.locator("tbody th").all_text_contents() == ["run-2"]
    await page.get_by_label("Label").fill("")
    await page.get_by_label("Order").select_option("latest")
    await page.get_by_role("button", name="Show").click()
    await page.get_by_role("row", name="run-1").wait_for()
    assert await page.locator("tbody th").all_text_contents() == ["run-2", "run-1"]
    await page.get_by_role("link", name="run-2").click()
    await page.locator(".timeline li", has_text='{"said": "hello there"}').wait_for()
    await page.locator("dl.facts", has_text="notes").wait_for()
    await page.get_by_role("button", name="Delete").click()
    await page.get_by_label("Type run-2").fill("run-2")
    await page.get_by_role("button", name="Go on").click()
    await page.get_by_role("row", name="run-1").wait_for()
    assert sorted(await page.locator("tbody th").all_text_contents()) == ["other", "run-1"]
    assert [one.name async for one in client.list_conversations("sessions")] == ["other", "run-1"]


async def test_messages_are_searched_by_their_text(visit: Visit) -> None:
    client = visit.console.client
    await client.create_memory("searched/notes")
    for name in ("run-1", "run-2"):
        filler = [NewMessage(role="user", content=f"chatter {number}") for number in range(120)]
        told = NewMessage(role="tool", body='{"City": "Reykjavik"}')
        await client.conversation(f"searched/{name}").append_messages([*filler, told])
    page = await visit.sign_in("conversations/searched?text=reykjavik")
    await page.locator(".timeline li", has_text="no. 121").nth(1).wait_for()
    assert await page.locator(".timeline li a").all_text_contents() == ["run-1", "run-2"]
    await page.get_by_label("Message with").fill("chatter 7")
    await page.get_by_role("button", name="Show").click()
    await page.locator(".timeline li", has_text="no. 8").first.wait_for()
    assert await page.locator(".timeline li").count() == 22
    await page.get_by_label("Message with").fill("nobody says this")
    await page.get_by_role("button", name="Show").click()
    await page.get_by_text("No message has these words.").wait_for()
    await page.go_back()
    await page.locator(".timeline li", has_text="no. 8").first.wait_for()
    await page.get_by_role("link", name="run-2").first.click()
    await page.locator(".timeline li", has_text="chatter 7").first.wait_for()


async def test_server_shows_use_calls_and_settings_to_an_admin(visit: Visit) -> None:
    await visit.console.client.server_info()
    page = await visit.sign_in("server")
    use = page.get_by_role("region", name="Use", exact=True)
    await use.get_by_text("observations stored").wait_for()
    for name in ("RAM", "CPU", "disk", "open streams", "memories in RAM"):
        await use.get_by_text(name, exact=True).wait_for()
    row = page.locator("table.calls tr", has=page.get_by_role("rowheader", name="GetServerInfo", exact=True))
    assert int((await row.locator("td").first.text_content()).replace(",", "")) > 0
    await row.locator("td").nth(1).get_by_text(".").wait_for()  # the rate, with the second read
    client = page.locator("table.clients tr", has_text="memstream-python").filter(has_text="key:root")
    assert await client.first.locator("td").nth(0).text_content() == "key:root"
    await page.get_by_text("Settings (").click()
    secret = page.locator("table.settings tr", has=page.get_by_role("rowheader", name="llm_api_key", exact=True))
    assert await secret.locator("td").first.text_content() == "**********"


async def test_server_shows_a_reader_no_use_and_no_settings(visit: Visit) -> None:
    page = await visit.sign_in("server", key="reader")
    await page.get_by_text("need the right admin in every namespace").wait_for()
    assert await page.locator("table.calls, table.settings, table.clients").count() == 0


async def test_purge_and_reindex_start_from_the_operations(visit: Visit) -> None:
    page = await visit.sign_in("operations")
    for button, type in (("Purge all namespaces", "purge"), ("Rebuild the index", "reindex")):
        await page.get_by_role("button", name=button).click()
        await page.locator("tbody tr").first.get_by_role("rowheader", name=type).wait_for()
    started = [one.type async for one in visit.console.client.operations()][:2]
    assert started == ["reindex", "purge"]
    async for one in visit.console.client.operations():
        if one.end_time is None:
            await visit.console.client.finished(one)


async def test_reader_starts_no_operation(visit: Visit) -> None:
    page = await visit.sign_in("operations", key="reader")
    assert await page.locator(".view .bar button").count() == 0
