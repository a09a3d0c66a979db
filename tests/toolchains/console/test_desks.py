"""The console's desks: a recall over several memories, blocks, and the context of a turn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from memstream import NewMessage, Observation
from tests.server.test_standing_blocks import block_with, settled
from tests.support.fake_openai import Fault
from tests.toolchains.console.conftest import Visit

pytestmark = [pytest.mark.toolchain, pytest.mark.asyncio(loop_scope="session")]


async def test_recall_desk_asks_several_memories(visit: Visit) -> None:
    client = visit.console.client
    for name, text in (
        ("shop/desk-bob", "Bob drinks green tea in the morning."),
        ("shop/desk-ann", "Ann drinks green tea in the evening."),
        ("shop/desk-eve", "The harbour closes at noon."),
        ("closed/desk", "Joe drinks green tea at noon."),
    ):
        memory = await client.create_memory(name)
        await memory.observe_batch([Observation(text)])
    page = await visit.sign_in("m/shop/desk-bob/recall", key="reader")
    more = page.get_by_role("button", name="Ask several memories")
    await more.click()
    names, weights = page.get_by_label("Memories", exact=True), page.get_by_label("Weight", exact=True)
    assert await names.first.input_value() == "shop/desk-bob", "the first one is the memory of the view"
    await names.nth(1).fill("closed/desk")
    await page.get_by_label("Query", exact=True).fill("Who drinks green tea?")
    await page.keyboard.press("Enter")
    await page.locator(".answer .problem", has_text="closed/desk").wait_for()
    await page.get_by_label("partial").check()
    await page.get_by_label("Kind").nth(1).select_option("prefix")
    await names.nth(1).fill("shop/desk-")
    await weights.nth(1).fill("0.5")
    await page.get_by_role("button", name="Recall", exact=True).click()
    rows = page.locator("tr[data-memory]")
    await page.locator("tr[data-memory='shop/desk-eve']", has_text="weak").wait_for()
    assert await rows.locator("th").all_text_contents() == ["shop/desk-bob", "shop/desk-ann", "shop/desk-eve"]
    found = page.locator(".ranking > li")
    assert "in shop/desk-bob" in await found.first.text_content()
    assert "in shop/desk-ann" in await found.nth(1).text_content()
    href = await found.nth(1).locator("a.id").first.get_attribute("href")
    assert href.startswith("#/m/shop/desk-ann/fragment/")
    assert await page.get_by_label("Why not this one?").count() == 0
    await page.reload()
    await page.locator("tr[data-memory='shop/desk-ann']").wait_for()
    assert await names.nth(1).input_value() == "shop/desk-"
    assert await weights.nth(1).input_value() == "0.5"
    await page.get_by_role("button", name="Remove these memories").first.click()
    await page.get_by_role("button", name="Remove these memories").first.click()
    await page.get_by_role("button", name="Recall", exact=True).click()
    await page.get_by_label("Why not this one?").wait_for()
    assert await rows.count() == 0


async def test_block_is_edited_and_keeps_what_was_typed(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/desk-blocks")
    await memory.blocks.put("persona", "I am Joy. I tell jokes.", max_tokens=50)
    page = await visit.sign_in("m/shop/desk-blocks/blocks")
    await page.get_by_role("link", name="persona").click()
    body, text = page.locator(".body"), page.get_by_label("Text", exact=True)
    await page.get_by_role("button", name="Edit", exact=True).click()
    await text.fill("I am Joy. I tell short jokes.")
    await memory.blocks.put("persona", "I am Joy. I sing.")
    await page.get_by_role("button", name="Save", exact=True).click()
    await page.get_by_text("changed meanwhile").wait_for()
    assert await text.input_value() == "I am Joy. I tell short jokes."
    assert (await memory.blocks.get("persona")).text == "I am Joy. I sing.", "nothing was saved"
    await text.fill("I am Joy. I tell short jokes and sing.")
    await page.get_by_role("button", name="Replace the present text by mine").click()
    await body.filter(has_text="short jokes and sing").wait_for()
    written = await memory.blocks.get("persona")
    assert (written.text, written.max_tokens) == ("I am Joy. I tell short jokes and sing.", 50)
    await page.locator("[data-version='2'] del", has_text="tell jokes").wait_for()
    await page.get_by_role("button", name="Delete …").click()
    await page.get_by_label("Type persona").fill("persona")
    await page.get_by_role("button", name="Go on").click()
    await page.get_by_text("This memory has no block").wait_for()
    await page.get_by_text("Create a block").click()
    await page.get_by_label("Name", exact=True).fill("task")
    await text.fill("Sing <b>fish</b>.")
    await page.get_by_role("button", name="Create the block").click()
    await body.filter(has_text="Sing <b>fish</b>.").wait_for()


async def test_reader_sees_blocks_without_buttons_that_write(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/desk-read")
    await memory.blocks.put("persona", "I am Joy.")
    page = await visit.sign_in("m/shop/desk-read/blocks", key="reader")
    await page.get_by_role("link", name="persona").wait_for()
    assert await page.get_by_text("Create a block").count() == 0
    await visit.go("m/shop/desk-read/blocks/persona")
    await page.locator(".versions [data-version]").wait_for()
    for name in ("Edit", "Delete …"):
        assert await page.get_by_role("button", name=name, exact=True).count() == 0


def _answer_with_words(body: Mapping[str, Any]) -> str:
    """The last word of each text that the LLM is shown, as a statement that cites it."""
    shown = json.loads(body["messages"][1]["content"])["texts"]
    return json.dumps(
        {"statements": [{"statement": one["text"].split()[-1], "evidence": [one["number"]]} for one in shown]}
    )


async def test_block_that_keeps_itself_says_how_and_when_it_fails(
    visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = visit.console.llm
    monkeypatch.setattr(llm, "complete", _answer_with_words)
    memory = await visit.console.client.create_memory("shop/desk-standing", kind="long_term")
    await memory.observe_batch([Observation("Bob likes to drink tea")])
    await memory.blocks.put("persona", "I am Joy.")
    await memory.blocks.keep("drinks", "What does <b>Bob</b> drink?", min_interval=timedelta(0))
    holding = await settled(memory)
    assert holding.standing is not None
    page = await visit.sign_in("m/shop/desk-standing/blocks")
    rows = page.locator("tbody tr")
    assert await rows.locator("th").all_text_contents() == ["drinks", "persona"]
    assert await rows.nth(0).locator(".mark").all_text_contents() == ["keeps itself"]
    assert await rows.nth(1).locator(".mark").count() == 0, "a block that somebody wrote"
    await page.get_by_role("link", name="drinks").click()
    await page.locator(".body", has_text="tea").wait_for()
    head = page.locator(".view")
    for term, value in (
        ("answers", "What does <b>Bob</b> drink?"),
        ("written by", "scripted"),
        ("holds at revision", str(holding.standing.revision)),
    ):
        fact = head.locator("dt", has_text=term).locator("xpath=following-sibling::dd[1]")
        assert await fact.text_content() == value
    assert await page.get_by_role("button", name="Edit", exact=True).count() == 0, "the question writes its text"
    assert await page.get_by_role("button", name="Delete …").count() == 1
    llm.fail(*[Fault(hang_up=True)] * 10_000)
    try:
        await memory.observe_batch([Observation("Bob likes to drink coffee")])
        stale = await block_with(memory, lambda one: one.standing and one.standing.problem)
        assert stale.standing is not None
        await page.reload()
        await page.locator(".view dt", has_text="not up to date").wait_for()
        assert await page.locator(".body").text_content() == "tea"
        await visit.go("m/shop/desk-standing/blocks")
        mark = rows.nth(0).locator(".mark.warn")
        await mark.wait_for()
        assert await mark.text_content() == "not up to date"
        assert await mark.get_attribute("title") == stale.standing.problem
    finally:
        llm.heal()
    await settled(memory)
    await page.reload()
    await rows.nth(0).locator(".mark", has_text="keeps itself").wait_for()
    assert "coffee" in await rows.nth(0).text_content()
    await memory.blocks.keep("drinks", "What does Bob drink?", scopes=[memory.path, "shop/desk-nobody"])
    await block_with(memory, lambda one: one.standing and one.standing.revisions)
    await page.get_by_role("link", name="drinks").click()
    fact = head.locator("dt", has_text="asks").locator("xpath=following-sibling::dd[1]")
    shown = (await fact.text_content() or "").split()
    assert (shown[:3], shown[4:]) == ([memory.path, "at", "revision"], ["shop/desk-nobody"])


async def test_context_desk_shows_parts_and_where_a_turn_differs(visit: Visit) -> None:
    client = visit.console.client
    memory = await client.create_memory("shop/desk-context")
    await memory.observe_batch(
        [Observation("Bob drinks green tea in the morning."), Observation("Bob is allergic to nuts.")]
    )
    await memory.blocks.put("persona", "I am Joy.")
    page = await visit.sign_in("m/shop/desk-context/context")
    question, following = page.get_by_label("Question", exact=True), page.get_by_label("Question of the next turn")
    await question.fill("What does Bob drink?")
    await following.fill("What is Bob allergic to?")
    await page.get_by_label("Blocks").fill("shop/desk-context#persona")
    await page.get_by_role("button", name="Build the context").click()
    first, later = page.get_by_label("First turn"), page.get_by_label("Next turn", exact=True)
    kinds = later.locator(".ranking > li .meta b")
    await kinds.first.wait_for()
    assert await first.locator(".ranking > li .meta b").all_text_contents() == ["block", "evidence", "question"]
    direct = await client.context(["shop/desk-context"], "What does Bob drink?", blocks=["shop/desk-context#persona"])
    assert f"tokens {direct.tokens}" in await first.locator(".summary").text_content()
    assert "I am Joy." in await first.locator(".ranking > li").first.text_content()
    await later.locator(".broken li", has_text="does not continue with the first question").wait_for()
    turning = later.locator(".ranking > li", has=page.locator(".turning"))
    assert await turning.count() == 1
    assert await turning.locator(".meta b").text_content() != "block", "the block is as it was"
    await page.reload()
    await later.locator(".turning").wait_for()
    await page.get_by_label("Budget, tokens").fill("1")
    await page.get_by_role("button", name="Build the context").click()
    await page.get_by_role("alert").get_by_text("budget").wait_for()


async def test_context_desk_shows_kept_texts_omissions_and_a_summary(visit: Visit) -> None:
    client = visit.console.client
    memory = await client.create_memory("shop/desk-kept")
    await memory.observe_batch([Observation("Bob drinks green tea in the morning."), Observation("Bob eats no nuts.")])
    said = [("user", "Bob eats no nuts."), ("assistant", "Noted."), ("user", "Which nuts does Bob eat?")]
    await client.conversation("shop/desk-kept-talk").append_messages(
        [NewMessage(role=role, content=content) for role, content in said]
    )
    page = await visit.sign_in("m/shop/desk-kept/context")
    await page.get_by_label("Question", exact=True).fill("Which nuts does Bob eat?")
    await page.get_by_label("Question of the next turn").fill("What does Bob drink?")
    await page.get_by_label("Conversation", exact=True).fill("shop/desk-kept-talk")
    await page.get_by_role("button", name="Build the context").click()
    first, later = page.get_by_label("First turn"), page.get_by_label("Next turn", exact=True)
    await later.locator(".summary").wait_for()
    await first.locator(".left-out li", has_text="a message in the text says it").wait_for()
    total = (await first.locator(".summary b").first.text_content()) or ""
    assert await later.locator(".summary b").nth(1).text_content() == f"{total} of {total}"
    assert await later.locator(".broken").count() == 0, "the text of the first turn is kept"
    kept, there = first.locator(".ranking > li > div"), later.locator(".ranking > li > div")
    count = await kept.count()
    assert (await there.all_text_contents())[:count] == await kept.all_text_contents()
    assert await later.locator(".ranking > li").nth(count).locator(".turning").count() == 1

    await memory.blocks.put("gist", "Bob asked about the sea.")
    await client.conversation("shop/desk-kept-talk").append_messages(
        [NewMessage(role="user", content="Tell me of the sea. " * 40)] * 4
    )
    await page.get_by_label("Summary").fill("shop/desk-kept#gist")
    await page.get_by_label("Budget, tokens").fill("300")
    await page.get_by_role("button", name="Build the context").click()
    for turn in (first, later):
        top = turn.locator(".ranking > li").first
        await top.get_by_text("Bob asked about the sea.").wait_for()
        assert "summary ·" in (await top.locator(".meta").text_content() or "")


async def test_context_desk_shows_what_the_model_is_sent(visit: Visit) -> None:
    """Texts and tokens part by part, what has no room, and the two turns up to the first byte that differs."""
    client = visit.console.client
    memory = await client.create_memory("shop/desk-sent")
    drinks = ("green tea in the morning", "black tea at noon", "milk in the evening", "water at night")
    await memory.observe_batch([Observation(f"Bob likes to drink {drink}, as he says.") for drink in drinks])
    await memory.blocks.put("persona", "I am <b>Joy</b>.")
    block, asked = f"{memory.path}#persona", "What does Bob drink?"
    direct = await client.context([memory.path], asked, blocks=[block], budget=90, reinforce=False)
    page = await visit.sign_in("m/shop/desk-sent/context", key="reader")
    await page.get_by_label("Question", exact=True).fill(asked)
    await page.get_by_label("Question of the next turn").fill("What does Bob drink at night?")
    await page.get_by_label("Blocks").fill(block)
    await page.get_by_label("Budget, tokens").fill("90")
    await page.get_by_role("button", name="Build the context").click()
    first, later = page.get_by_label("First turn"), page.get_by_label("Next turn", exact=True)
    await later.locator(".summary").wait_for()
    heads, texts = first.locator(".ranking .meta"), first.locator(".ranking > li > div")
    assert len(direct.parts) == await heads.count()
    for place, part in enumerate(direct.parts):
        head = await heads.nth(place).text_content()
        assert f"{part.kind} · {part.tokens} tokens" in head
        assert (block in head) == (part.kind == "block")
        if part.kind != "question":  # which has the time
            assert await texts.nth(place).text_content() == part.text
    left_out = await first.locator(".left-out li", has_text="no room in the budget").all_text_contents()
    assert len(left_out) == len([one for one in direct.left_out if one.reason == "budget"]) > 0
    there = later.locator(".ranking > li > div")
    shown, after = await texts.all_text_contents(), await there.all_text_contents()
    where = "all => all.findIndex(one => one.querySelector('.turning'))"
    new = await later.locator(".ranking > li").evaluate_all(where)
    assert new > 0
    assert after[:new] == shown[:new]
    (marked,) = await later.locator("mark").all_text_contents()
    kept = after[new].removesuffix(marked)
    assert kept != after[new]
    assert shown[new].startswith(kept)
    assert not shown[new].startswith(kept + marked[0])
