"""Every view of the console in Chromium, with what a server holds."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta

import pytest

import memstream
from memstream import Observation, OperationState
from memstream.errors import CursorCompacted
from tests.support.waiting import until
from tests.toolchains.console.conftest import Console, Visit

pytestmark = [pytest.mark.toolchain, pytest.mark.asyncio(loop_scope="session")]
TEA = ["Bob drinks green tea in the morning.", "Ann cycles to the harbour.", "Eve repairs clocks in Lisbon."]


async def fill(console: Console, name: str, texts: list[str] = TEA, **options: object) -> memstream.Memory:
    """A memory shop/NAME with these texts."""
    memory = await console.client.create_memory(f"shop/{name}", **options)
    await memory.observe_batch([Observation(text, speaker="Bob", session="monday") for text in texts])
    return memory


async def test_memories_show_labels_sizes_and_pages(visit: Visit) -> None:
    client = visit.console.client
    await asyncio.gather(*(client.create_memory(f"many/m-{number:03d}") for number in range(101)))
    await client.create_memory("many/labelled", labels={"team": "core"})
    memory = await client.create_memory("many/z-filled")
    await memory.observe_batch(TEA)
    page = await visit.sign_in("namespace/many")
    stored = await page.locator("[data-stored]").text_content()
    assert re.fullmatch(r"Stores [\d.]+ KB: fragments [\d.]+ KB, history [\d.]+ KB, requests [\d.]+ KB", stored), stored
    rows = page.locator("table.memories tbody tr")
    assert await rows.count() == 100
    await page.route("**/memstream.v1.MemoryService/ListMemories", lambda route: route.abort(), times=1)
    await page.get_by_role("button", name="Next").click()
    await page.get_by_text("The server does not answer.").wait_for()
    await page.get_by_role("button", name="Next").click()
    await page.get_by_text("101 to 103").wait_for()
    filled = rows.filter(has_text="z-filled")
    await filled.locator("[data-count=shortTerm]").get_by_text("3", exact=True).wait_for()
    assert await filled.locator("[data-count=backlog]").text_content() == "0"
    await page.get_by_role("button", name="Previous").click()
    await page.get_by_text("1 to 100").wait_for()
    await page.get_by_label("Name begins with").fill("z-")
    await page.get_by_text("1 to 1", exact=True).wait_for()
    await rows.get_by_role("link", name="z-filled").click()
    await page.get_by_role("heading", name="many / z-filled").wait_for()


async def test_memories_are_found_by_their_labels_on_all_pages(visit: Visit) -> None:
    client = visit.console.client
    await asyncio.gather(*(client.create_memory(f"labelled/m-{number:03d}") for number in range(101)))
    await client.create_memory("labelled/a", labels={"team": "core", "a=b": "<b>x</b>"})
    await client.create_memory("labelled/z", labels={"team": "core"})
    page = await visit.sign_in("namespace/labelled")
    names, chosen = page.locator("table.memories tbody th"), page.get_by_role("group", name="Chosen labels")
    await page.get_by_role("searchbox", name="Label").fill("team=core")
    await page.keyboard.press("Enter")
    await page.get_by_text("1 to 2", exact=True).wait_for()
    assert await names.all_text_contents() == ["a", "z"]
    await page.get_by_role("button", name="a=b=<b>x</b>", exact=True).click()
    await page.get_by_text("1 to 1", exact=True).wait_for()
    assert await names.all_text_contents() == ["a"]
    for name in ("a=b=<b>x</b>", "team=core"):
        await chosen.get_by_role("button", name=f"List without {name}").click()
    await page.get_by_text("1 to 100").wait_for()
    await page.get_by_role("searchbox", name="Label").fill("team")
    await page.keyboard.press("Enter")
    await page.get_by_text("A label is written as key=value.").wait_for()
    await page.get_by_role("searchbox", name="Label").fill("team=none")
    await page.keyboard.press("Enter")
    await page.get_by_text("No memory has such a name and these labels.").wait_for()


async def test_live_view_shows_moves_with_their_reasons(visit: Visit) -> None:
    policy = {"sensory": {"capacity": 1}, "short_term": {"capacity": 3, "enhance_threshold": 2}}
    memory = await visit.console.client.create_memory("shop/live", policy=policy)
    page = await visit.sign_in("m/shop/live/live")
    await page.locator("[data-state=live]").wait_for()
    cards = {name: page.locator(f"[data-tier={name}] .card") for name in ("sensory", "shortTerm", "longTerm")}
    await memory.observe_batch(["Ann cycles to the harbour."])
    await cards["sensory"].filter(has_text="Ann cycles").wait_for()
    await memory.observe_batch([f"Eve repairs the clock of tower {name}." for name in ("one", "two", "three", "four")])
    await cards["longTerm"].first.wait_for()
    reasons = page.locator("table.steps tbody tr")
    enhanced = reasons.filter(has=page.locator("td.event", has_text="enhanced")).first
    assert re.search(r"by \w{8}, cosine 0\.\d{3}", await enhanced.locator(".reason").text_content())
    assert "sensory → short-term" in await reasons.filter(has_text="admitted").first.text_content()
    stats = await memory.stats()
    for name, number in (("sensory", stats.sensory), ("shortTerm", stats.short_term), ("longTerm", stats.long_term)):
        await page.locator(f"[data-tier={name}] .count", has_text=re.compile(rf"^{number}( |$)")).wait_for()
    await page.get_by_role("button", name="Pause").click()
    await memory.observe_batch(["Joe sells maps while the page waits."])
    await page.get_by_role("button", name="Continue").click()
    await page.locator(".card", has_text="Joe sells maps").wait_for()
    assert await page.locator(".card", has_text="Joe sells maps").count() == 1


async def test_each_score_is_a_bar_that_is_its_sum(visit: Visit) -> None:
    await fill(visit.console, "bars")
    page = await visit.sign_in("m/shop/bars/recall")
    await page.get_by_label("Query", exact=True).fill("What does Bob drink in the morning?")
    await page.keyboard.press("Enter")
    first = page.locator(".ranking > li").first
    assert "green tea" in await first.text_content()
    score = float(await first.locator(".score b").text_content())
    parts = await first.locator(".parts tbody tr:not(.sum) td:nth-child(4)").all_text_contents()
    assert sum(float(part.replace("\N{MINUS SIGN}", "-")) for part in parts) == pytest.approx(score, abs=0.005)
    assert await first.locator(".sum .problem").count() == 0
    widths = await first.locator(".score-bar span").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect().width)"
    )
    whole = await first.locator(".score-bar").evaluate("bar => bar.getBoundingClientRect().width")
    assert sum(widths) == pytest.approx(whole, rel=0.01), "the best score is the longest bar"
    summary = await page.locator(".summary").text_content()
    assert "3 of 3 eligible" in summary
    assert re.search(r"server, ms .*score \d+\.\d", summary), "timings of the steps"


async def test_recall_shows_a_reply_under_its_message(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/replies")
    chat = [
        Observation("how do I reach the harbour?", role=memstream.Role.USER),
        Observation("take the tram over the iron bridge", role=memstream.Role.ASSISTANT),
    ]
    await memory.observe_batch(chat, session="s")
    page = await visit.sign_in("m/shop/replies/recall")
    await page.get_by_label("Query", exact=True).fill("which tram reaches the harbour?")
    await page.keyboard.press("Enter")
    first = page.locator(".ranking > li")
    await first.get_by_role("list", name="reply").get_by_text("iron bridge").wait_for()
    assert await first.count() == 1, "the reply takes no place"
    await page.get_by_label("Why not this one?").fill("iron bridge")
    await page.get_by_role("button", name="Explain", exact=True).click()
    await page.get_by_text("It is in the answer").wait_for()


async def test_recall_marks_folded_weak_and_near_misses(visit: Visit) -> None:
    memory = await fill(visit.console, "marks")
    await memory.observe_batch([Observation(TEA[0], speaker="Bob", session="tuesday")])
    page = await visit.sign_in("m/shop/marks/recall")
    await page.get_by_label("Query", exact=True).fill("green tea")
    await page.get_by_label("Limit").fill("1")
    await page.get_by_role("button", name="Recall").click()
    await page.locator(".ranking > li .mark", has_text="folded 1").wait_for()
    misses = page.locator("details", has_text="Near misses").locator("tbody tr")
    assert {"limit", "folded"} <= set(await misses.locator(".mark").all_text_contents())
    await misses.filter(has_text="limit").first.get_by_role("button", name="explain").click()
    await page.get_by_text("Removed by limit").wait_for()
    await page.get_by_label("Query", exact=True).fill("quantum chromodynamics of neutron stars")
    await page.get_by_role("button", name="Recall").click()
    await page.locator(".mark.weak").wait_for()


async def test_why_not_names_the_stage_and_the_score(visit: Visit) -> None:
    memory = await fill(visit.console, "why")
    (outcome,) = (
        await memory.observe_batch([Observation("Kim paints boats.", session="friday", external_id="kim")])
    ).outcomes
    page = await visit.sign_in("m/shop/why/recall")
    await page.get_by_label("Query", exact=True).fill("Who paints boats?")
    await page.get_by_text("Filter and weights").click()
    await page.get_by_label("Session").fill("monday")
    await page.get_by_role("button", name="Recall").click()
    await page.get_by_label("Why not this one?").fill("kim")
    await page.get_by_role("button", name="Explain", exact=True).click()
    await page.get_by_text("Removed by filter").wait_for()
    assert await page.locator(".box .parts .sum").count() == 1, "its score without the filter"
    await page.get_by_label("Session").fill("")
    await page.get_by_role("button", name="Recall", exact=True).click()
    await page.locator(".ranking > li", has_text="Kim paints").wait_for()
    await page.get_by_label("Why not this one?").fill(outcome.fragment_id)
    await page.get_by_role("button", name="Explain", exact=True).click()
    await page.get_by_text("It is in the answer, at place 1.").wait_for()
    await page.get_by_label("Why not this one?").fill("cycles to the harbour")
    await page.get_by_role("button", name="Explain", exact=True).click()
    await (
        page.locator(".box", has_text="Ann cycles to the harbour.")
        .get_by_text(re.compile("at place|Removed by"))
        .wait_for()
    )
    await page.get_by_label("Why not this one?").fill("nothing-of-that-name")
    await page.get_by_role("button", name="Explain", exact=True).click()
    await page.locator(".box .problem").wait_for()


async def test_two_queries_are_shown_side_by_side(visit: Visit) -> None:
    await fill(visit.console, "two")
    page = await visit.sign_in("m/shop/two/recall")
    await page.get_by_label("Query", exact=True).fill("Who cycles?")
    await page.get_by_role("button", name="Compare two queries").click()
    second = page.get_by_role("region", name="Query 2")
    assert await second.get_by_role("textbox", name="Query").input_value() == "Who cycles?"
    await second.get_by_label("Limit").fill("1")
    for pane in (page.get_by_role("region", name="Query 1"), second):
        await pane.get_by_role("button", name="Recall").click()
        await pane.locator(".ranking").wait_for()
    assert await second.locator(".ranking > li").count() == 1
    left, right = [await pane.bounding_box() for pane in await page.locator(".pane").all()]
    assert left["y"] == right["y"]
    assert right["x"] >= left["x"] + left["width"]


async def test_fragment_shows_fields_life_and_sources(visit: Visit) -> None:
    policy = {"short_term": {"capacity": 3, "enhance_threshold": 2}}
    memory = await visit.console.client.create_memory("shop/lives", policy=policy)
    await memory.observe_batch([f"Eve repairs the clock of tower {name}." for name in ("one", "two", "three", "four")])
    promoted = next(one for one in [each async for each in memory.list_fragments()] if one.sources)
    page = await visit.sign_in(f"m/shop/lives/fragment/{promoted.id}")
    await page.get_by_text(re.compile(r"^\d+ events\.")).wait_for()
    types = await page.locator("table.steps tbody td.event").all_text_contents()
    assert types[0] == "observed"
    assert "promoted" in types
    assert await page.locator("section", has_text="Sources").locator("li").count() == len(promoted.sources)
    source = page.locator("section", has_text="Sources").locator("li a").first
    await source.click()
    derived = page.locator("section", has=page.get_by_role("heading", name="What derives from it"))
    await derived.locator("li", has_text=promoted.id[-8:]).wait_for()


async def test_life_begins_at_the_oldest_event_that_is_kept(visit: Visit) -> None:
    policy = {"retention": {"event_retention": timedelta(seconds=1)}}
    memory = await fill(visit.console, "pruned", policy=policy)

    async def pruned() -> bool:
        await memory.observe_batch(["Another hour has struck."])
        async with memory.watch("beginning") as watch:
            try:
                await anext(aiter(watch))
            except CursorCompacted:
                return True
        return False

    await until(pruned)
    one = await anext(aiter(memory.list_fragments()))
    page = await visit.sign_in(f"m/shop/pruned/fragment/{one.id}")
    await page.get_by_text(re.compile(r"^\d+ events\. .* are no longer kept")).wait_for()


async def test_fragment_is_pinned_edited_forgotten_and_restored(visit: Visit) -> None:
    memory = await fill(visit.console, "edits")
    tea = next(one for one in [each async for each in memory.list_fragments()] if "tea" in one.content)
    page = await visit.sign_in(f"m/shop/edits/fragment/{tea.id}")
    await page.get_by_role("button", name="Pin", exact=True).click()
    await page.get_by_role("button", name="Unpin").wait_for()
    await page.get_by_role("button", name="Edit").click()
    await page.get_by_label("Content").fill("Bob drinks black tea.")
    await page.keyboard.press("Control+Enter")
    await page.locator(".body bdi", has_text="black tea").wait_for()
    read = await memory.get_fragment(tea.id)
    assert (read.content, read.pinned) == ("Bob drinks black tea.", True)
    await page.get_by_role("button", name="Forget").click()
    await page.get_by_role("button", name="Restore", exact=True).click()
    await page.locator(".body", has_text="black tea").wait_for()
    assert (await memory.get_fragment(tea.id)).forget_time is None


async def test_edit_of_a_changed_fragment_saves_nothing(visit: Visit) -> None:
    memory = await fill(visit.console, "races")
    one = await anext(aiter(memory.list_fragments()))
    page = await visit.sign_in(f"m/shop/races/fragment/{one.id}")
    await page.get_by_role("button", name="Edit").click()
    await memory.update_fragment(one.id, content="Somebody else was first.")
    await page.get_by_label("Content").fill("Too late.")
    await page.get_by_role("button", name="Save").click()
    await page.get_by_text("was changed meanwhile").wait_for()
    assert (await memory.get_fragment(one.id)).content == "Somebody else was first."
    assert await page.get_by_label("Content").input_value() == "Too late.", "what was typed is not lost"
    await page.get_by_role("button", name="Load it again").click()
    await page.locator(".body", has_text="Somebody else was first.").wait_for()


async def test_timeline_groups_fragments_by_session(visit: Visit) -> None:
    memory = await fill(visit.console, "days")
    joe = Observation("Joe sells maps.", session=" friday?&#ü ", speaker="Joe")
    await memory.observe_batch([joe, Observation("Bob calls back.", session="monday")])
    page = await visit.sign_in("m/shop/days/timeline")
    headings = page.locator(".session h2 .given")
    assert await headings.all_text_contents() == ["monday", joe.session, "monday"]
    listed = page.get_by_role("navigation", name="Sessions of this page").locator("li")
    assert await listed.all_text_contents() == ["monday (4)", f"{joe.session} (1)"]
    alone = page.get_by_text("1 to 1", exact=True)
    await page.locator(".session h2 a").nth(1).click()
    await alone.wait_for()
    assert await headings.all_text_contents() == [joe.session]
    await page.go_back()
    await listed.nth(1).get_by_role("link").click()
    await alone.wait_for()
    assert await headings.all_text_contents() == [joe.session]
    await page.get_by_role("link", name="Timeline").click()
    await page.locator(".session").nth(2).wait_for()
    await page.get_by_label("Speaker").fill("Joe")
    await page.get_by_role("button", name="Show").click()
    await page.locator(".session").nth(1).wait_for(state="detached")
    assert "Joe sells maps." in await page.locator(".timeline").text_content()


async def test_conversation_grows_while_it_is_open(visit: Visit) -> None:
    talk = visit.console.client.conversation("shop/talk")
    await talk.append("bob", "hello", receiver="joy")
    page = await visit.sign_in("conversations/shop/talk")
    await page.locator(".timeline li", has_text="hello").wait_for()
    await talk.append("joy", "good evening", receiver="bob")
    await page.locator(".timeline[aria-label='New messages'] li", has_text="good evening").wait_for()


async def test_running_operation_is_cancelled_from_its_row(visit: Visit) -> None:
    console = visit.console
    memory = await fill(console, "reflecting", kind=memstream.MemoryKind.LONG_TERM)
    console.llm.latency_s = 600.0
    try:
        operation = await memory.reflect()
        page = await visit.sign_in("operations")
        row = page.locator(f"tr[data-id='{operation.id}']")
        await row.filter(has_text="running").wait_for()
        await row.get_by_role("button", name="Cancel").click()
        await row.filter(has_text="cancelled").wait_for()
    finally:
        console.llm.latency_s = 0.0
    assert (await console.client.finished(operation)).state is OperationState.CANCELLED


async def test_server_view_shows_health_and_use_of_models(visit: Visit) -> None:
    console = visit.console
    memory = await fill(console, "asked", kind=memstream.MemoryKind.LONG_TERM)
    await console.client.finished(await memory.reflect())
    page = await visit.sign_in("server")
    info = await console.client.server_info()
    assert info.journal in await page.locator(".facts").first.text_content()
    use = page.get_by_role("region", name="Use of models").locator("tbody tr", has_text="insights")
    assert int((await use.locator("td.number").first.text_content()).replace(",", "")) > 0
    await page.get_by_text("Limits").click()
    await page.get_by_text("recall limit max").wait_for()
    await visit.go("m/shop/asked/live")
    await page.get_by_text("Use of models by this memory").click()
    spent = page.get_by_role("region", name="Use of models by this memory").locator("tbody tr", has_text="reflection")
    await spent.wait_for()
    async with memory.watch("beginning", types=[memstream.EventType.MODEL_ASKED]) as watch:
        used = (await anext(aiter(watch))).model_use
    shown = [f"{number:,}" for number in (used.requests, used.prompt_tokens, used.completion_tokens)]
    assert await spent.locator("td.number").all_text_contents() == shown
    await fill(console, "never-asked")
    await visit.go("m/shop/never-asked/live")
    await page.get_by_text("Use of models by this memory").click()
    await page.get_by_text("No LLM was asked on its behalf.").wait_for()
