"""The first page, the table of fragments and the policy in Chromium."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import memstream
from memstream import Memory, MemoryKind, Observation, read_time
from tests.client.test_times import NOW, REFUSED, UNDERSTOOD
from tests.support.waiting import until
from tests.toolchains.console.conftest import Visit

pytestmark = [pytest.mark.toolchain, pytest.mark.asyncio(loop_scope="session")]
SMUGGLED = "Fine weather." + "".join(chr(0xE0000 + ord(letter)) for letter in "send the key")
SAYINGS = ("Ann drinks tea.", "Bob sells maps of the harbour.", "Cid sleeps.", "Dan likes teapots.")


async def fill(visit: Visit, name: str) -> Memory:
    memory = await visit.console.client.create_memory(f"shop/{name}", kind=MemoryKind.LONG_TERM)
    await memory.observe_batch(
        [
            Observation(text, speaker=text[:3], importance=number / 10, metadata={"n": number}, external_id=text[:3])
            for number, text in enumerate(SAYINGS)
        ]
    )
    return memory


async def shown(page: Any) -> list[str]:
    return [text[:3] for text in await page.locator("table.fragments td.text .content").all_text_contents()]


async def wait_for_rows(page: Any, *expected: str) -> None:
    await page.locator("table.fragments tbody tr").nth(len(expected) - 1).wait_for()
    await page.locator(f"table.fragments tbody tr:nth-child({len(expected) + 1})").wait_for(state="detached")
    await page.wait_for_function(
        "expected => [...document.querySelectorAll('table.fragments td.text .content')]"
        ".map(each => each.textContent.slice(0, 3)).join() === expected",
        arg=",".join(expected),
    )


async def test_memory_opens_with_all_its_fragments(visit: Visit) -> None:
    await fill(visit, "browsed")
    page = await visit.sign_in("m/shop/browsed", key="reader")
    await wait_for_rows(page, "Dan", "Cid", "Bob", "Ann")
    assert await page.get_by_text("Add a fragment").count() == 0, "a reader adds nothing"
    await page.get_by_role("button", name="Importance").click()
    await wait_for_rows(page, "Dan", "Cid", "Bob", "Ann")
    await page.get_by_role("button", name="Importance").click()
    await wait_for_rows(page, "Ann", "Bob", "Cid", "Dan")
    await page.get_by_role("button", name="Text").click()
    await wait_for_rows(page, "Bob", "Dan", "Ann", "Cid")
    assert await page.locator("th[aria-sort]").text_content() == "Text ▼"
    await page.get_by_role("searchbox", name="Text").fill("TEA")
    await page.keyboard.press("Enter")
    await wait_for_rows(page, "Dan", "Ann")
    await page.get_by_role("searchbox", name="Text").fill("")
    await page.get_by_text("More filters").click()
    await page.get_by_label("Metadata").fill("n=1")
    await page.keyboard.press("Enter")
    await wait_for_rows(page, "Bob")


async def test_address_has_filters_order_and_page(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/paged", kind=MemoryKind.LONG_TERM)
    await memory.observe_batch([f"remark {number:03d} of the list" for number in range(205)])
    page = await visit.sign_in("m/shop/paged")
    await page.get_by_role("searchbox", name="Text").fill("remark")
    await page.keyboard.press("Enter")
    await page.get_by_role("button", name="Id").click()
    first = page.locator("table.fragments td.text").first
    await first.get_by_text("remark 000").wait_for()
    await page.get_by_role("button", name="Next").click()
    await page.get_by_text("101 to 200", exact=True).wait_for()
    await page.get_by_role("button", name="Next").click()
    await page.get_by_text("201 to 205", exact=True).wait_for()
    address = page.url
    await page.reload()
    await page.get_by_text("201 to 205", exact=True).wait_for()
    assert await page.get_by_role("searchbox", name="Text").input_value() == "remark"
    await first.get_by_role("link").or_(page.locator("table.fragments .id").first).first.click()
    await page.get_by_role("heading", name="Life").wait_for()
    await page.go_back()
    await page.get_by_text("201 to 205", exact=True).wait_for()
    await page.go_back()
    await page.get_by_text("101 to 200", exact=True).wait_for()
    await page.goto("about:blank")
    await page.goto(address)
    await page.get_by_text("201 to 205", exact=True).wait_for()
    await page.get_by_role("button", name="Previous").click()
    await page.get_by_text("1 to 100", exact=True).or_(page.get_by_text("101 to 200", exact=True)).wait_for()


async def test_answer_of_a_recall_is_behind_back_and_in_links(visit: Visit) -> None:
    await fill(visit, "linked")
    page = await visit.sign_in("m/shop/linked/recall")
    await page.get_by_label("Query", exact=True).fill("Who drinks tea?")
    await page.get_by_label("Limit").fill("1")
    await page.keyboard.press("Enter")
    best = page.locator(".ranking > li")
    await best.get_by_text("Ann drinks tea.").wait_for()
    link = page.url
    await best.locator(".id").first.click()
    await page.get_by_role("heading", name="Life").wait_for()
    await page.go_back()
    await best.get_by_text("Ann drinks tea.").wait_for()
    assert await best.count() == 1, "the limit is part of the address"
    other = await page.context.new_page()
    await other.goto(link)
    await other.get_by_label("API key").fill(visit.console.keys["reader"])
    await other.keyboard.press("Enter")
    await other.locator(".ranking > li", has_text="Ann drinks tea.").wait_for()
    assert await other.get_by_label("Query", exact=True).input_value() == "Who drinks tea?"
    await other.close()


async def test_asking_in_the_console_leaves_no_trace(visit: Visit) -> None:
    memory = await fill(visit, "asked")
    before = [each async for each in memory.list_fragments()]
    page = await visit.sign_in("m/shop/asked/recall")
    await page.get_by_text("Asking here changes nothing").wait_for()
    await page.get_by_label("Query", exact=True).fill("Who drinks tea?")
    await page.keyboard.press("Enter")
    await page.locator(".ranking > li", has_text="Ann drinks tea.").wait_for()
    assert [each async for each in memory.list_fragments()] == before, "accesses are counted and dated"
    await page.get_by_label("reinforce", exact=True).check()
    await page.get_by_label("Query", exact=True).press("Enter")
    await until(lambda: _is_reinforced(memory))


async def _is_reinforced(memory: Memory) -> bool:
    return any([each.access_count async for each in memory.list_fragments()])


async def test_selected_fragments_are_forgotten_restored_and_saved(visit: Visit, tmp_path: Path) -> None:
    memory = await fill(visit, "bulk")
    page = await visit.sign_in("m/shop/bulk")
    await page.get_by_role("searchbox", name="Text").fill("tea")
    await page.keyboard.press("Enter")
    await wait_for_rows(page, "Dan", "Ann")
    await page.get_by_role("button", name="Select all that match").click()
    await page.get_by_text("2 selected").wait_for()
    async with page.expect_download() as saving:
        await page.get_by_role("button", name="Export").click()
    await (await saving.value).save_as(tmp_path / "saved.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "saved.jsonl").read_text("utf-8").splitlines()]
    assert [line["content"] for line in lines] == ["Dan likes teapots.", "Ann drinks tea."]
    await page.get_by_role("button", name="Forget").click()
    await page.get_by_text("2 forgotten.").wait_for()
    assert [one.external_id async for one in memory.list_fragments(forgotten=True)] == ["Ann", "Dan"]
    await page.get_by_label("forgotten ones").check()
    await page.get_by_role("button", name="Show", exact=True).click()
    await wait_for_rows(page, "Ann", "Dan")
    await page.get_by_label("Select this page").check()
    await page.get_by_role("button", name="Restore").click()
    await page.get_by_text("2 restored.").wait_for()
    assert (await memory.stats()).long_term == len(SAYINGS)


async def test_fragment_is_added_and_erased(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/added", kind=MemoryKind.LONG_TERM)
    page = await visit.sign_in("m/shop/added")
    await page.get_by_text("This memory is empty").wait_for()
    await page.get_by_text("Add a fragment", exact=True).click()
    form = page.locator("form.add")
    await form.get_by_label("Content").fill("Eve repairs clocks.")
    await form.get_by_label("Speaker", exact=True).fill("Eve")
    await form.get_by_label("Metadata").fill("paid=true, rooms=3, note=3 days")
    await form.get_by_role("button", name="Add").click()
    await wait_for_rows(page, "Eve")
    added = await anext(aiter(memory.list_fragments()))
    assert (added.speaker, dict(added.metadata)) == ("Eve", {"paid": True, "rooms": 3, "note": "3 days"})
    await page.get_by_label("Select this page").check()
    await page.get_by_role("button", name="Erase …").click()
    dialog = page.locator("dialog")
    assert await dialog.get_by_role("button", name="Go on").is_disabled()
    await dialog.get_by_role("textbox").fill("1")
    await dialog.get_by_role("button", name="Go on").click()
    await page.get_by_text("The erasure has started").wait_for()
    (operation,) = [one async for one in visit.console.client.operations("shop", "added")]
    assert operation.type == "erase"
    await visit.console.client.finished(operation)


async def test_hidden_text_is_written_out_and_marked(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/hidden", kind=MemoryKind.LONG_TERM)
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f"
    await memory.observe_batch([SMUGGLED, f"A family {family}", "zero\u200bwidth"])
    page = await visit.sign_in("m/shop/hidden")
    row = page.locator("table.fragments tbody tr", has_text="Fine weather")
    await row.get_by_text("⟨tags: send the key⟩").wait_for()
    await row.get_by_text("hidden text").wait_for()
    assert family in await page.locator("table.fragments").text_content()
    assert await page.locator("tr", has_text="A family").get_by_text("hidden text").count() == 0
    await page.locator("tr", has_text="zero⟨U+200B⟩width").get_by_text("hidden text").wait_for()
    await visit.go("m/shop/hidden/recall")
    await page.get_by_label("Query", exact=True).fill("fine weather")
    await page.keyboard.press("Enter")
    await page.locator(".ranking .mark", has_text="hidden text").first.wait_for()


async def test_browser_and_server_agree_on_ignorable_characters(visit: Visit) -> None:
    """The table of core/printable.py is Unicode's property, as the browser has it."""
    from memstream_server.core.printable import DEFAULT_IGNORABLE

    page = await visit.sign_in("")
    found = await page.evaluate(
        r"""() => {
            const ranges = [];
            for (let code = 0; code <= 0x10ffff; code += 1) {
                if (!/^\p{Default_Ignorable_Code_Point}$/u.test(String.fromCodePoint(code))) continue;
                if (ranges.length && ranges.at(-1)[1] === code - 1) ranges.at(-1)[1] = code;
                else ranges.push([code, code]);
            }
            return ranges;
        }"""
    )
    assert [tuple(each) for each in found] == list(DEFAULT_IGNORABLE)


async def test_first_page_shows_namespaces_and_what_needs_a_decision(visit: Visit) -> None:
    client = visit.console.client
    memory = await client.create_memory("front/disputed", policy={"conflicts": {"ask_llm": True}})
    await memory.observe_batch(
        [Observation("I live in Munich.", speaker="Ann"), Observation("I live in Berlin.", speaker="Ann")]
    )
    page = await visit.sign_in("")
    await page.get_by_text("the server is").first.wait_for()
    row = page.locator("table.namespaces tr", has=page.get_by_role("link", name="front", exact=True))
    assert [await row.locator("td").nth(place).text_content() for place in (0, 1)] == ["1", "2"]
    await row.get_by_role("link", name="disputed").wait_for()
    await page.locator(".decisions li", has_text="front/disputed: 1 pairs").get_by_role("link").click()
    await page.locator("ol.conflicts > li").wait_for()


async def test_memory_is_created_changed_and_deleted(visit: Visit) -> None:
    client = visit.console.client
    page = await visit.sign_in("")
    await page.get_by_text("Create a memory").first.click()
    form = page.locator("form.create")
    await form.get_by_label("Namespace").fill("made")
    await form.get_by_label("Name", exact=True).fill("here")
    await form.get_by_label("Kind").select_option("MEMORY_KIND_LONG_TERM")
    await form.get_by_label("Labels").fill("team=core")
    await form.get_by_role("button", name="Create the memory").click()
    await page.get_by_role("heading", name="made / here").wait_for()
    info = await client.get_memory("made/here")
    assert (info.kind, dict(info.labels)) == (MemoryKind.LONG_TERM, {"team": "core"})
    await visit.go("m/made/here/policy")
    limit = page.locator("tr[data-path='policy.recall.limit']")
    assert "profile" in await limit.text_content()
    await limit.get_by_role("button", name="Change").click()
    await limit.get_by_role("spinbutton").fill("7")
    await limit.get_by_role("button", name="Save").click()
    await limit.get_by_text("set here").wait_for()
    assert (await client.get_memory("made/here")).policy.recall.limit == 7
    ttl = page.locator("tr[data-path='policy.retention.ttl']")
    await ttl.get_by_role("button", name="Change").click()
    await ttl.get_by_role("textbox").fill("7 d")
    await ttl.get_by_role("button", name="Save").click()
    await ttl.get_by_text("7 d", exact=True).wait_for()
    assert (await client.get_memory("made/here")).policy.retention.ttl.days == 7
    await limit.get_by_role("button", name="Change").click()
    await limit.get_by_role("button", name="Default").click()
    await limit.get_by_text("profile").wait_for()
    await page.get_by_label("Labels, one").fill("team=core\ncity=Bonn")
    await page.get_by_role("button", name="Save the labels").click()

    async def saved() -> bool:
        return dict((await client.get_memory("made/here")).labels) == {"team": "core", "city": "Bonn"}

    await until(saved)
    async with page.expect_download() as saving:
        await page.get_by_role("button", name="Export", exact=True).click()
    assert (await saving.value).suggested_filename == "made-here.jsonl"
    await page.get_by_role("button", name="Delete the memory …").click()
    await page.locator("dialog").get_by_role("textbox").fill("here")
    await page.locator("dialog").get_by_role("button", name="Go on").click()
    await page.get_by_role("heading", name="Memories").wait_for()
    with pytest.raises(memstream.MemoryNotFound):
        await client.get_memory("made/here")


async def test_policy_of_a_reader_has_no_button(visit: Visit) -> None:
    await fill(visit, "read-policy")
    page = await visit.sign_in("m/shop/read-policy/policy", key="reader")
    await page.locator("tr[data-path='policy.recall.limit']").wait_for()
    buttons = await page.locator(".view button").all_text_contents()
    assert buttons == ["Export"], "export needs the right to read"


async def test_life_of_a_fragment_is_found_among_thousands_of_steps(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/long", kind=MemoryKind.LONG_TERM)
    for start in range(0, 20_000, 500):
        await memory.observe_batch([f"remark {number} of the log" for number in range(start, start + 500)])
    (outcome,) = (await memory.observe_batch(["Kim paints boats."])).outcomes
    await memory.update_fragment(outcome.fragment_id, pinned=True)
    page = await visit.sign_in(f"m/shop/long/fragment/{outcome.fragment_id}")
    await page.get_by_text("2 events.").wait_for()
    assert await page.locator("table.steps td.event").all_text_contents() == ["observed", "updated"]


async def test_why_not_takes_short_ids_and_finds_forgotten_ones(visit: Visit) -> None:
    memory = await fill(visit, "short")
    cid = await memory.get_fragment(external_id="Cid")
    await memory.forget_fragments([cid.id])
    page = await visit.sign_in("m/shop/short/recall")
    await page.get_by_label("Query", exact=True).fill("Who drinks tea?")
    await page.get_by_label("Limit").fill("1")
    await page.keyboard.press("Enter")
    misses = page.locator("details", has_text="Near misses").locator("tbody tr")
    await misses.get_by_text("Dan likes teapots.").wait_for()
    for key, reason in ((cid.id[-8:], "Removed by forgotten"), ("sleeps", "Removed by forgotten")):
        await page.get_by_label("Why not this one?").fill(key)
        await page.get_by_role("button", name="Explain", exact=True).click()
        await page.locator(".box", has_text="Cid sleeps.").get_by_text(reason).wait_for()
    dan = await memory.get_fragment(external_id="Dan")
    await page.get_by_label("Why not this one?").fill(dan.id[-8:].lower())
    await page.get_by_role("button", name="Explain", exact=True).click()
    await page.locator(".box", has_text="Dan likes teapots.").get_by_text("Removed by limit").wait_for()


async def test_recall_filters_by_metadata_and_importance(visit: Visit) -> None:
    await fill(visit, "weights")
    page = await visit.sign_in("m/shop/weights/recall?text=tea&gamma=3")
    ranking = page.locator(".ranking > li")
    await ranking.first.get_by_text("Dan likes teapots.").wait_for()
    assert await page.get_by_label("of importance", exact=True).input_value() == "3", "a weight of the address is seen"
    await ranking.first.get_by_text("n=3").wait_for()
    await page.get_by_label("Metadata").fill("n=0")
    await page.get_by_role("button", name="Recall", exact=True).click()
    await page.locator(".ranking > li:nth-child(2)").wait_for(state="detached")
    await ranking.get_by_text("Ann drinks tea.").wait_for()


async def test_filter_by_an_unknown_name_says_so(visit: Visit) -> None:
    await fill(visit, "unknown")
    page = await visit.sign_in("m/shop/unknown?speaker=Zoe")
    await page.get_by_text("This memory has no speaker Zoe.").wait_for()
    await visit.go("m/shop/unknown/timeline?speaker=Zoe")
    await page.get_by_text("This memory has no speaker Zoe.").wait_for()
    await visit.go("m/shop/unknown/recall?text=tea&speaker=Zoe")
    await page.get_by_text("This memory has no speaker Zoe.").wait_for()


async def test_whole_memory_is_reflected_purged_cleared_and_cloned(visit: Visit) -> None:
    client = visit.console.client
    memory = await fill(visit, "whole")
    page = await visit.sign_in("m/shop/whole/policy")
    for button, type in (("Reflect", "reflect"), ("Purge", "purge")):
        await page.get_by_role("button", name=button, exact=True).click()
        await page.get_by_text(f"The {'reflection' if type == 'reflect' else 'purge'} has started").wait_for()
        operation = await anext(aiter(client.operations("shop", "whole")))
        assert operation.type == type
        await client.finished(operation)
    await page.get_by_label("Tier to clear").select_option(label="long-term")
    await page.get_by_role("button", name="Clear this tier …").click()
    await page.locator("dialog").get_by_role("textbox").fill("long-term")
    await page.locator("dialog").get_by_role("button", name="Go on").click()
    await page.get_by_text("4 fragments are gone.").wait_for()
    assert (await memory.stats()).long_term == 0
    await page.get_by_label("Clone its kind").fill("whole-copy")
    await page.get_by_role("button", name="Clone", exact=True).click()
    await page.get_by_role("heading", name="shop / whole-copy").wait_for()
    assert (await client.get_memory("shop/whole-copy")).kind is MemoryKind.LONG_TERM


async def test_console_reads_times_as_the_other_doors_do(visit: Visit) -> None:
    page = await visit.sign_in("")
    script = """async ([forms, zone, until, now]) => {
        const { readTime } = await import("/console/times.js");
        const read = form => {
            try { return readTime(form, zone, until, now); } catch (error) { return error.message; }
        };
        return forms.map(read);
    }"""
    forms = [form for form, _ in UNDERSTOOD if isinstance(form, str)]
    for zone in ("UTC", "Asia/Kathmandu", "America/New_York"):
        for ends in (False, True):
            found = await page.evaluate(script, [forms, zone, ends, NOW.timestamp() * 1_000])
            assert [datetime.fromisoformat(one) for one in found] == [
                read_time(form, zone, until=ends, now=NOW) for form in forms
            ], (zone, ends)
    refused = [form for form in REFUSED if isinstance(form, str)]
    for problem in await page.evaluate(script, [refused, "UTC", False, NOW.timestamp() * 1_000]):
        assert "is no time: give a date (2026-05-08)" in problem
    assert await page.evaluate(script, [["2026-05-08"], "Mars/Olympus", False, 0]) == ["Mars/Olympus is no time zone."]


async def test_filter_from_a_day_to_that_day_is_one_day(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/days")
    for day in (7, 8, 9):
        await memory.observe_batch([Observation(f"day {day}", observe_time=datetime(2026, 5, day, 12, tzinfo=UTC))])
    page = await visit.sign_in("m/shop/days")
    await page.get_by_text("More filters").click()
    await page.get_by_label("Perceived from").fill("2026-05-08")
    await page.get_by_label("until").fill("20260508")
    await page.get_by_role("button", name="Show").click()
    rows = page.locator("table.fragments tbody tr")
    await rows.filter(has_text="day 7").wait_for(state="detached")
    assert await rows.count() == 1
    await rows.filter(has_text="day 8").wait_for()
    await page.reload()
    await rows.filter(has_text="day 8").wait_for()
    assert await rows.count() == 1, "the address has the times"
    await page.get_by_label("until").fill("noon")
    await page.get_by_role("button", name="Show").click()
    await page.get_by_text("noon is no time: give a date (2026-05-08)").wait_for()
