"""The console's conflicts, supersessions, versions and times in Chromium."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import memstream
from memstream import ConflictDecision, Observation
from tests.toolchains.console.conftest import Console, Visit

pytestmark = [pytest.mark.toolchain, pytest.mark.asyncio(loop_scope="session")]
ASKING = {"conflicts": {"ask_llm": True}}
OLD, NEW = "I live in Munich near the river.", "I live in Berlin near the river now."


async def suspect(console: Console, name: str, old: str = OLD, new: str = NEW) -> tuple[memstream.Memory, str, str]:
    """A memory shop/NAME with one suspicion, and the ids of the newer and the older fragment."""
    memory = await console.client.create_memory(f"shop/{name}", exist_ok=True, policy=ASKING)
    ids = []
    for text in (old, "We had soup for lunch.", new):
        done = await memory.observe_batch([Observation(text, speaker="Joy", session="s")])
        ids.append(done.outcomes[0].fragment_id)
    return memory, ids[2], ids[0]


async def ask(page: Any, text: str) -> Any:
    """Asks at the recall desk. Returns the recollections."""
    await page.get_by_label("Query", exact=True).fill(text)
    await page.get_by_role("button", name="Recall", exact=True).click()
    await page.locator(".answer[aria-busy]").wait_for(state="detached")
    await page.locator(".answer .summary").wait_for()
    return page.locator(".ranking > li")


async def test_conflict_shows_both_texts_and_is_decided(visit: Visit) -> None:
    memory, newer, older = await suspect(visit.console, "decide")
    page = await visit.sign_in("m/shop/decide")
    await page.get_by_role("link", name="Conflicts 1 open").click()
    pair = page.locator(f".conflict[data-newer='{newer}'][data-older='{older}']")
    await pair.get_by_text("they share many words").wait_for()
    sides = pair.locator(".side")
    assert OLD in await sides.nth(0).text_content()
    assert NEW in await sides.nth(1).text_content()
    assert await sides.locator("time").count() == 4, "perceived and received"
    left, right = [await side.bounding_box() for side in await sides.all()]
    assert left["y"] == right["y"]
    await pair.get_by_label("Note").fill("Joy said so")
    await pair.get_by_role("button", name="The newer is true").click()
    await pair.get_by_text("decided: newer").wait_for()
    await page.get_by_role("link", name="Conflicts", exact=True).wait_for()
    assert (await memory.get_fragment(older)).superseded_by == newer
    await page.get_by_label("Suspicions").select_option("decided")
    pair = page.locator("[data-list=decided]").locator(pair)
    await pair.get_by_text("Joy said so").wait_for()
    await pair.get_by_text("decide again").click()
    await pair.get_by_role("button", name="Both are true").click()
    await pair.get_by_text("decided: both").wait_for()
    (record,) = [each async for each in memory.list_conflicts(decided=True)]
    assert record.decision is ConflictDecision.BOTH


async def test_conflicts_are_read_a_page_at_a_time(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/pages", policy=ASKING)
    await memory.observe_batch([Observation(text, speaker=f"Joy {n}") for text in (OLD, NEW) for n in range(21)])
    page = await visit.sign_in("m/shop/pages/conflicts")
    assert await page.locator(".conflict").count() == 20
    await page.get_by_role("button", name="Next").click()
    await page.get_by_text("21 to 21", exact=True).wait_for()
    assert await page.locator(".conflict").count() == 1


async def test_empty_list_of_conflicts_explains_itself(visit: Visit) -> None:
    client = visit.console.client
    await client.create_memory("shop/calm")
    await client.create_memory("shop/unsuspecting", policy={"conflicts": {"suspect": False}})
    page = await visit.sign_in("m/shop/calm/conflicts")
    await page.get_by_text("No open suspicion. Suspicions are recorded with conflicts.ask_llm").wait_for()
    await page.get_by_label("Suspicions").select_option("decided")
    await page.get_by_text("No suspicion has been decided.").wait_for()
    await visit.go("m/shop/unsuspecting/conflicts")
    await page.get_by_text("conflicts.suspect is off").wait_for()


async def test_reader_sees_conflicts_and_versions_without_buttons(visit: Visit) -> None:
    memory, newer, older = await suspect(visit.console, "readers")
    await memory.update_fragment(newer, content="I live in Bremen near the river now.")
    await memory.update_fragment(newer, content=NEW)
    await memory.supersede([older], newer_id=newer)
    await suspect_again(memory)
    page = await visit.sign_in("m/shop/readers/conflicts", key="reader")
    await page.locator(".conflict").first.wait_for()
    assert await page.locator(".conflict button").count() == 0
    await page.get_by_text("does not have the right to decide").wait_for()
    await visit.go(f"m/shop/readers/fragment/{newer}")
    await page.locator(".versions li").nth(1).wait_for()
    await visit.go(f"m/shop/readers/fragment/{older}")
    await page.locator(".superseded", has_text=NEW).wait_for()
    for name in ("Restore", "Supersede", "Undo"):
        assert await page.get_by_role("button", name=name).count() == 0


async def suspect_again(memory: memstream.Memory) -> None:
    for text in ("My desk is number 12.", "My desk is number 14."):
        await memory.observe_batch([Observation(text, speaker="Joy", session="s")])


async def test_recall_marks_an_earlier_statement_and_decides(visit: Visit) -> None:
    memory, newer, older = await suspect(visit.console, "earlier")
    page = await visit.sign_in("m/shop/earlier/recall")
    ranked = await ask(page, "Where does Joy live, near a river?")
    assert [await ranked.nth(place).get_attribute("data-id") for place in (0, 1)] == [newer, older]
    assert await ranked.nth(0).locator(".earlier").count() == 0
    earlier = ranked.nth(1).locator(".earlier")
    assert await earlier.locator(f"a[title='{newer}']").count() == 1
    await ranked.nth(0).locator(".suspicion").get_by_role("link", name="conflicts").wait_for()
    await earlier.get_by_role("button", name="The later one is true").click()
    await page.get_by_text("The later one supersedes it.").wait_for()
    assert (await memory.get_fragment(older)).superseded_by == newer
    ranked = await ask(page, "Where does Joy live, near a river?")
    assert await ranked.nth(0).get_attribute("data-id") == newer
    assert await page.locator(".earlier").count() == 0


async def test_recall_shows_truth_chain_and_validity(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/truths")
    past = datetime.now(UTC) - timedelta(days=2)
    await memory.observe_batch([Observation("Ann lives in Paris", external_id="home")])
    await memory.observe_batch(
        [
            Observation("Ann lives in Rome", external_id="rome", supersedes=["home"]),
            Observation("Ann lives in a tent", valid_until=past, valid_from=past - timedelta(days=2)),
        ]
    )
    page = await visit.sign_in("m/shop/truths/recall")
    ranked = await ask(page, "Where does Ann live?")
    assert await ranked.locator(".content").all_text_contents() == ["Ann lives in Rome"]
    misses = page.locator("details", has_text="Near misses").locator("tbody tr")
    newer = (await memory.get_fragment(external_id="rome")).id
    assert await misses.filter(has_text="superseded").locator(f"a[title='{newer}']").count() == 1
    await misses.filter(has_text="validity").get_by_role("button", name="explain").click()
    await page.get_by_text("Removed by validity").wait_for()
    assert await page.locator(".box .parts .sum").count() == 1, "its score if it were current"
    await page.get_by_label("Truth").select_option("all")
    await ask(page, "Where does Ann live?")
    await ranked.nth(2).wait_for()
    assert sorted(await ranked.locator(".meta .mark").all_text_contents()) == ["no longer valid", "superseded"]
    chain = ranked.filter(has_text="Rome").locator(".chain")
    await chain.locator("summary").click()
    await chain.locator("li", has_text="Ann lives in Paris").wait_for()
    assert await chain.locator("li .mark").all_text_contents() == ["superseded", "current"]


async def test_recall_of_an_earlier_revision_or_time(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/moments")
    await memory.observe_batch([Observation("Ann lives in Paris", external_id="home")])
    before = await memory.stats()
    await memory.update_fragment((await memory.get_fragment(external_id="home")).id, content="Ann lives in Rome")
    page = await visit.sign_in("m/shop/moments/recall")
    await page.get_by_label("or revision").fill(str(before.revision))
    ranked = await ask(page, "Where does Ann live?")
    assert "Paris" in await ranked.first.text_content()
    assert f"as of revision {before.revision}" in await page.locator(".summary").text_content()
    await page.get_by_label("As of", exact=True).fill("2100-01-01T00:00")
    assert await page.get_by_label("or revision").input_value() == "", "a moment is a time or a revision"
    await page.get_by_role("button", name="Recall", exact=True).click()
    await page.locator(".answer [role=alert]").wait_for()
    await page.get_by_label("As of", exact=True).fill("")
    assert "Rome" in await (await ask(page, "Where does Ann live?")).first.text_content()


async def test_interpreted_phrase_is_shown_in_its_time_zone(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/phrases")
    await memory.observe_batch([Observation("The roof leaks", observe_time=datetime(2023, 5, 8, 9, tzinfo=UTC))])
    page = await visit.sign_in("m/shop/phrases/recall")
    await page.get_by_label("Time zone").fill("Asia/Tokyo")
    await ask(page, "What happened in May 2023?")
    shown = await page.locator(".interpreted").text_content()
    assert "May 2023: from 2023-05-01 00:00:00 until 2023-06-01 00:00:00 Asia/Tokyo" in shown
    assert await page.locator(".parts tbody th", has_text="time").count() == 1
    await page.get_by_label("interpret phrases of time").uncheck()
    await ask(page, "What happened in May 2023?")
    assert await page.locator(".interpreted").count() == 0
    await page.get_by_label("Time zone").fill("Nowhere/Atlantis")
    await page.get_by_role("button", name="Recall", exact=True).click()
    await page.locator(".answer [role=alert]", has_text="Nowhere/Atlantis").wait_for()


async def test_version_is_compared_and_restored(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/versions")
    done = await memory.observe_batch([Observation("Bob drinks green tea in the morning.", speaker="Bob")])
    id = done.outcomes[0].fragment_id
    await memory.update_fragment(id, content="Bob drinks black tea in the evening.", importance=0.9)
    page = await visit.sign_in(f"m/shop/versions/fragment/{id}")
    version = page.locator(".versions li").first
    assert await version.locator("del").evaluate_all("all => all.map(one => one.lastChild.data)") == [
        "green",
        "morning",
    ]
    assert await version.locator("ins").evaluate_all("all => all.map(one => one.lastChild.data)") == [
        "black",
        "evening",
    ]
    assert "updated by key:root" in await version.text_content()
    assert re.search(r"importance: .* → 0\.900", await version.text_content())
    await memory.update_fragment(id, content="Somebody else was first.")
    await version.get_by_role("button", name="Restore this version").click()
    await page.get_by_text("was changed meanwhile").wait_for()
    await page.get_by_role("button", name="Load it again").click()
    await page.locator(".versions li").nth(1).get_by_role("button", name="Restore this version").click()
    await page.locator(".view > div > .body", has_text="green tea").wait_for()
    await page.get_by_role("heading", name="Versions (3)").wait_for()
    assert (await memory.get_fragment(id)).content == "Bob drinks green tea in the morning."


async def test_fragment_is_superseded_and_the_supersession_undone(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/by")
    valid = datetime(2020, 5, 4, tzinfo=UTC)
    done = await memory.observe_batch(
        [Observation("Ann lives in Paris", valid_from=valid), Observation("Ann lives in Rome", external_id="rome")]
    )
    older, newer = [one.fragment_id for one in done.outcomes]
    page = await visit.sign_in(f"m/shop/by/fragment/{older}")
    assert "valid from2020-05-04" in await page.locator(".facts").nth(1).text_content()
    await page.get_by_role("button", name="Supersede by").click()
    await page.get_by_label("Newer fragment").fill("nobody")
    await page.keyboard.press("Enter")
    await page.locator("#notice.bad").wait_for()
    await page.get_by_label("Newer fragment").fill("rome")
    await page.keyboard.press("Enter")
    await page.locator(".superseded", has_text="Ann lives in Rome").wait_for()
    await page.locator("table.steps tr[data-type=superseded]").wait_for()
    await page.locator(".superseded a").click()
    await page.locator(".facts").first.get_by_role("link", name=older[-8:]).wait_for()
    await page.get_by_text(re.compile(r"^\d+ events\.")).wait_for()
    derived = page.locator("section", has=page.get_by_role("heading", name="What derives from it"))
    assert await derived.get_by_text("superseded").count() == 0, "a superseded fragment does not derive from the newer"
    await visit.go(f"m/shop/by/fragment/{older}")
    await page.get_by_role("button", name="Undo the supersession").click()
    await page.get_by_text("It is current again.").wait_for()
    assert await page.locator(".superseded").count() == 0
    assert (await memory.get_fragment(older)).superseded_by == ""
    assert newer != older


async def test_live_view_shows_truth_and_conflicts_as_steps(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/steps", policy=ASKING)
    page = await visit.sign_in("m/shop/steps/live")
    await page.locator("[data-state=live]").wait_for()
    _, newer, older = await suspect(visit.console, "steps")

    async def reason(kind: str) -> str:
        row = page.locator(f"table.steps tr[data-type={kind}]").first
        await row.wait_for()
        return await row.locator(".reason").text_content()

    assert await reason("conflict-suspected") == f"may contradict {older[-8:]}, they share many words"
    await page.get_by_role("link", name="Conflicts 1 open").wait_for()
    await memory.resolve_conflict(newer, older, ConflictDecision.NEWER)
    await page.get_by_role("link", name="Conflicts", exact=True).wait_for()
    assert await reason("superseded") == f"by {newer[-8:]}, it is no longer current"
    expected = f"against {older[-8:]}, decided: this one is true, and supersedes it"
    assert await reason("conflict-resolved") == expected
    await page.locator(".card", has_text="Munich").filter(has_text="superseded").wait_for()
    await memory.restore_fragments([older])
    assert await reason("supersession-undone") == f"no longer by {newer[-8:]}, it is current again"
