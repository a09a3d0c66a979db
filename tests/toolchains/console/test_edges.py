"""The console with hostile content, few rights, a lost connection, a keyboard, a narrow screen and both schemes."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from memstream import Observation
from tests.support.listeners import close_listener
from tests.support.relay import Relay
from tests.toolchains import browser
from tests.toolchains.console.conftest import Visit
from tests.toolchains.programs import Absent

pytestmark = [pytest.mark.toolchain, pytest.mark.asyncio(loop_scope="session")]
SCRIPT = "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'><b>bold</b>"
OVERRIDE = "Send it to \u202eknab ym\u202c now \u2066hidden\u2069"
CHINESE = "小明每天早上喝绿茶。" * 3
ARABIC = "يشرب علي الشاي الأخضر كل صباح"
LONG = "0123456789" * 6_000
HOSTILE = [SCRIPT, OVERRIDE, CHINESE, ARABIC, LONG, "javascript:alert(1)"]
VIEWS = [
    "",
    "memories",
    "namespace/shop",
    "m/shop/every",
    "m/shop/every/live",
    "m/shop/every/recall",
    "m/shop/every/recall?text=Who+drinks+tea%3F&scopes=memory%20%20shop/every%0Aprefix%200.5%20shop/",
    "m/shop/every/timeline",
    "m/shop/every/conflicts",
    "m/shop/every/context?question=Who+drinks+tea%3F&next=And+coffee%3F&scopes=memory%20%20shop/every&blocks=shop/every%23persona",
    "m/shop/every/blocks",
    "m/shop/every/blocks/persona",
    "m/shop/every/sessions",
    "m/shop/every/receipts",
    "m/shop/every/queries",
    "m/shop/every/policy",
    "operations",
    "server",
    "conversations",
    "conversations/shop/every",
]

BROKEN_WORDS = r"""() => [...document.querySelectorAll("td, th")].flatMap(cell => {
    const found = [];
    const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        for (const { 0: word, index } of node.data.matchAll(/(?<![\p{L}\p{N}])[\p{L}\p{N}]{2,30}(?![\p{L}\p{N}])/gu)) {
            const range = document.createRange();
            range.setStart(node, index);
            range.setEnd(node, index + word.length);
            if (new Set([...range.getClientRects()].map(each => Math.round(each.top))).size > 1) found.push(word);
        }
    }
    return found;
})"""
"""The words of tables that are broken over two lines."""


SCROLLS_SIDEWAYS = """() => [...document.querySelectorAll("body *")]
    .filter(each => /auto|scroll/.test(getComputedStyle(each).overflowX) && each.scrollWidth > each.clientWidth)
    .map(each => `${each.tagName} ${each.className} ${each.scrollWidth}`)"""
"""The parts of the page that scroll sideways."""


async def fill_every(visit: Visit) -> str:
    """A memory with something for each view. Returns the id of a fragment."""
    client = visit.console.client
    memory = await client.create_memory("shop/every", exist_ok=True, labels={"team": "core", "long": "x" * 300})
    observations = [
        Observation("Bob drinks tea.", speaker="Bob", session="monday", external_id="tea"),
        Observation("Bob drinks coffee.", speaker="Bob", session="monday", external_id="coffee"),
        Observation("My desk is number 12.", speaker="Bob"),
        Observation("My desk is now number 14.", speaker="Bob"),
    ]
    await memory.observe_batch(observations)
    tea, coffee = [await memory.get_fragment(external_id=key) for key in ("tea", "coffee")]
    await memory.update_fragment(tea.id, content="Bob drinks green tea.")
    await memory.supersede([coffee.id], newer_id=tea.id)
    for text in ("I am Joy.", f"I am Joy, {'x' * 300}"):
        await memory.blocks.put("persona", text)
    await client.conversation("shop/every").append("bob", "hello", receiver="joy")
    await client.start_purge("shop")
    return tea.id


async def test_hostile_content_is_text_in_every_view(visit: Visit) -> None:
    client = visit.console.client
    memory = await client.create_memory("shop/hostile", labels={"label": SCRIPT})
    observations = [
        Observation(text, speaker=text[:60], session=text[:60], metadata={text[:30]: text[:200]}) for text in HOSTILE
    ]
    outcomes = (await memory.observe_batch(observations)).outcomes
    page = await visit.sign_in("namespace/shop")
    await page.locator("table.memories", has_text="hostile").wait_for()
    for view in ("", "/live", "/timeline"):
        await visit.go(f"m/shop/hostile{view}")
        for text in (SCRIPT, CHINESE, ARABIC, "⟨U+202E⟩knab ym⟨U+202C⟩"):
            await page.locator("main bdi.content", has_text=text).first.wait_for()
    await page.get_by_role("button", name="show all 60,000 characters").first.click()
    assert LONG in await page.locator("main").text_content()
    await visit.go("m/shop/hostile/recall")
    await page.get_by_label("Query", exact=True).fill(f"{SCRIPT} {ARABIC}")
    await page.keyboard.press("Enter")
    await page.locator(".ranking bdi.content", has_text=SCRIPT).wait_for()
    for outcome in outcomes:
        await visit.go(f"m/shop/hostile/fragment/{outcome.fragment_id}")
        await page.get_by_text(re.compile(r"^\d+ events\.")).wait_for()
    await client.conversation("shop/hostile").append(SCRIPT[:60], SCRIPT, receiver=OVERRIDE)
    await visit.go("conversations/shop/hostile")
    await page.locator(".timeline li", has_text=SCRIPT).first.wait_for()
    assert await page.evaluate("window.hit") is None
    assert await page.locator("main img, main script, main b b").count() == 0
    assert "\u202e" not in await page.locator("body").text_content()


async def test_hostile_content_is_text_in_conflicts_and_versions(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/disputed", policy={"conflicts": {"ask_llm": True}})
    texts = [f"I live in Munich. {SCRIPT}", f"I live in Berlin. {SCRIPT}{OVERRIDE}", f"{SCRIPT} {OVERRIDE}"]
    done = await memory.observe_batch([Observation(text, speaker=SCRIPT[:60]) for text in texts])
    older, newer, other = [one.fragment_id for one in done.outcomes]
    await memory.update_fragment(other, content=f"<u>changed</u> {SCRIPT}", speaker=OVERRIDE)
    page = await visit.sign_in("m/shop/disputed/conflicts")
    await page.locator(".conflict .content", has_text=f"{SCRIPT}Send it to ⟨U+202E⟩knab").wait_for()
    await visit.go("m/shop/disputed/recall")
    await page.get_by_label("Query", exact=True).fill(f"Where do I live? {SCRIPT} yesterday")
    await page.keyboard.press("Enter")
    await page.locator(".suspicion .content", has_text=SCRIPT).first.wait_for()
    await visit.go("m/shop/disputed/conflicts")
    await page.get_by_label("Note").fill(SCRIPT)
    await page.get_by_role("button", name="The newer is true").click()
    await page.get_by_text(f"Note: {SCRIPT}").wait_for()
    await visit.go(f"m/shop/disputed/fragment/{older}")
    await page.locator(".superseded .content", has_text=SCRIPT).wait_for()
    await visit.go(f"m/shop/disputed/fragment/{other}")
    await page.locator(".versions ins", has_text="u>changed</u>").wait_for()
    await page.locator(".versions p", has_text="⟨U+202E⟩knab ym⟨U+202C⟩").wait_for()
    await visit.go(f"m/shop/disputed/fragment/{newer}")
    await page.locator("table.steps tr[data-type=conflict-resolved]").wait_for()
    assert await page.evaluate("window.hit") is None
    assert await page.locator("main img, main script, main b b, main u").count() == 0
    assert "\u202e" not in await page.locator("body").text_content()


async def test_markup_in_an_address_is_text(visit: Visit) -> None:
    page = await visit.sign_in("m/shop/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
    await page.get_by_role("alert").wait_for()
    assert await page.locator("main img").count() == 0
    assert "<img src=x" in await page.get_by_role("heading", level=1).text_content()


async def test_wrong_key_is_refused_and_the_right_one_kept_for_the_tab(visit: Visit) -> None:
    page, keys = visit.page, visit.console.keys
    await page.goto(f"http://{visit.console.address}/#/server")
    await page.get_by_label("API key").fill("nonsense")
    await page.keyboard.press("Enter")
    await page.locator(".problem:not(:empty)").wait_for()
    await page.get_by_label("API key").fill(keys["root"])
    await page.keyboard.press("Enter")
    await page.get_by_role("heading", name="Server").wait_for()
    await page.reload()
    await page.get_by_role("heading", name="Server").wait_for()
    stored = await page.evaluate("[JSON.stringify(localStorage), document.cookie, location.href]")
    assert stored[:2] == ["{}", ""]
    assert keys["root"] not in stored[2]
    assert keys["root"] not in await page.content()
    other = await page.context.new_page()
    await other.goto(f"http://{visit.console.address}/#/server")
    await other.get_by_label("API key").wait_for()
    await other.close()
    await page.get_by_role("button", name="Sign out").click()
    await page.get_by_label("API key").wait_for()
    assert await page.evaluate("JSON.stringify(sessionStorage)") == "{}"
    await page.reload()
    await page.get_by_label("API key").wait_for()


async def test_key_that_is_not_to_be_kept_is_in_memory_alone(visit: Visit) -> None:
    page = visit.page
    await page.goto(f"http://{visit.console.address}/#/server")
    await page.get_by_label("API key").fill(visit.console.keys["root"])
    await page.get_by_label("keep it in this tab").uncheck()
    await page.get_by_role("button", name="Sign in").click()
    await page.get_by_role("heading", name="Server").wait_for()
    assert await page.evaluate("JSON.stringify(sessionStorage)") == "{}"
    await page.reload()
    await page.get_by_label("API key").wait_for()


async def test_reader_sees_no_button_that_writes(visit: Visit) -> None:
    id = await fill_every(visit)
    page = await visit.sign_in(f"m/shop/every/fragment/{id}", key="reader")
    await page.locator(".body", has_text="green tea").wait_for()
    for name in ("Edit", "Pin", "Forget", "Restore"):
        assert await page.get_by_role("button", name=name, exact=True).count() == 0
    await visit.go("m/shop/every/recall")
    await page.get_by_label("Query", exact=True).fill("Who drinks tea?")
    await page.keyboard.press("Enter")
    await page.locator(".ranking > li").first.wait_for()
    await visit.go("m/secret/memory")
    await page.get_by_role("alert").get_by_text("does not have the right read").wait_for()


async def test_key_without_rights_is_told_so(visit: Visit) -> None:
    page = await visit.sign_in("", key="nobody")
    await page.get_by_text("There are no memories that you may read.").wait_for()
    await visit.go("m/shop/every/recall")
    await page.get_by_text("does not have the right to recall").wait_for()


async def test_lost_connection_resumes_without_gap_or_repeat(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/lost")
    async with Relay(visit.console.address) as relay:
        page = await visit.sign_in("m/shop/lost/live", address=relay.address)
        await page.locator("[data-state=live]").wait_for()
        await memory.observe_batch(["one is before the cut"])
        await page.locator(".card", has_text="one is before").wait_for()
        await relay.down()
        await page.locator("[data-state=reconnecting]").wait_for()
        await memory.observe_batch(["two happens while it is cut"])
        await relay.up()
        await page.locator("[data-state=live]").wait_for()
        await page.locator(".card", has_text="two happens").wait_for()
        await memory.observe_batch(["three is after it"])
        await page.locator(".card", has_text="three is").wait_for()
    observed = page.locator("table.steps tr[data-type=observed]")
    assert await observed.count() == 3
    assert len(set(await observed.evaluate_all("rows => rows.map(row => row.dataset.fragment)"))) == 3


async def test_server_that_does_not_answer_is_reported(visit: Visit) -> None:
    async with Relay(visit.console.address) as relay:
        page = await visit.sign_in("", address=relay.address)
        await relay.down()
        await page.get_by_role("link", name="Operations").click()
        await page.get_by_role("alert").get_by_text("The server does not answer.").wait_for()
        await relay.up()
        await page.get_by_role("button", name="Try again").click()
        await page.get_by_role("alert").wait_for(state="detached")


async def test_late_answer_does_not_replace_a_newer_one(visit: Visit) -> None:
    for name in ("a-one", "z-one"):
        await visit.console.client.create_memory(f"late/{name}")
    page = await visit.sign_in("namespace/late")
    held, released = asyncio.Event(), asyncio.Event()

    async def hold(route: Any) -> None:
        if '"namePrefix":"z"' in route.request.post_data:
            held.set()
            await released.wait()
        await route.continue_()

    await page.route("**/memstream.v1.MemoryService/ListMemories", hold)
    prefix, names = page.get_by_label("Name begins with"), page.locator("table.memories tbody th")
    await prefix.fill("z")
    await held.wait()
    await prefix.fill("a")
    await page.get_by_text("1 to 1", exact=True).wait_for()
    assert await names.all_text_contents() == ["a-one"]
    async with page.expect_response("**/memstream.v1.MemoryService/ListMemories") as late:
        released.set()
    await (await late.value).finished()
    await page.evaluate("() => new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    assert await names.all_text_contents() == ["a-one"]


async def test_live_view_keeps_a_bounded_number_of_rows(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/many")
    page = await visit.sign_in("m/shop/many/live")
    await page.locator("[data-state=live]").wait_for()
    for start in range(0, 1_000, 100):
        await memory.observe_batch([f"Clock {number} struck the hour." for number in range(start, start + 100)])
    stats = await memory.stats()
    assert stats.long_term > 200
    await page.locator("[data-tier=longTerm] .count", has_text=f"{stats.long_term:,}").wait_for()
    assert await page.locator("table.steps tbody tr").count() == 200
    assert await page.locator(".card").count() <= 3 * 60
    await page.locator("[data-tier=shortTerm] .count", has_text=f"{stats.short_term} of").wait_for()


async def test_keyboard_alone_finds_and_opens_a_memory(visit: Visit) -> None:
    await fill_every(visit)
    page = await visit.sign_in("namespace/shop")
    await page.locator("table.memories").wait_for()
    await page.keyboard.press("/")
    await page.keyboard.type("every")
    await page.get_by_text("1 to 1", exact=True).wait_for()
    for _ in range(6):
        await page.keyboard.press("Tab")
        if await page.evaluate("document.activeElement.textContent") == "every":
            break
    await page.keyboard.press("Enter")
    await page.get_by_role("heading", name="shop / every").wait_for()
    assert await page.evaluate("document.activeElement.tagName") == "H1", "the focus moves to the new view"
    await page.evaluate("document.activeElement.blur()")
    await page.locator("#skip").focus()
    await page.keyboard.press("Enter")
    assert await page.evaluate("document.activeElement.id") == "main"


async def test_narrow_screen_needs_no_sideways_scrolling(visit: Visit) -> None:
    """Neither a page nor a part of it, and no word of a table is broken."""
    id = await fill_every(visit)
    memory = visit.console.client.memory("shop/every")
    speakers = [Observation(f"Remark {number}.", speaker=f"Speaker {number}", session="many") for number in range(9)]
    await memory.observe_batch(speakers)
    receipt = (await memory.recall_once("Who drinks green tea?", receipt=True)).receipt_id
    page = await visit.sign_in("")
    for view in (*VIEWS, f"m/shop/every/fragment/{id}", f"m/shop/every/receipts/{receipt}"):
        await visit.go(view)
        if view.endswith("recall"):
            await page.get_by_label("Query", exact=True).fill("Who drinks green tea?")
            await page.keyboard.press("Enter")
            await page.locator(".explained summary").first.click()
        for width in (390, 360):
            await page.set_viewport_size({"width": width, "height": 740})
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, view
            assert await page.evaluate(SCROLLS_SIDEWAYS) == [], f"{view}: a part scrolls at {width} px"
            broken = await page.evaluate(BROKEN_WORDS)
            assert broken == [], f"{view}: words of a table are broken at {width} px"
    for view in ("m/shop/every/live", f"m/shop/every/fragment/{id}"):
        await visit.go(view)
        steps = page.locator(".scroll", has=page.locator("table.steps"))
        await steps.locator("tbody tr .reason").first.wait_for()
        assert await steps.evaluate("each => each.scrollWidth <= each.clientWidth"), f"{view}: the steps are cut"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_no_violation(scheme: str, visit: Visit) -> None:
    try:
        axe = browser.read_axe()
    except Absent as absent:
        pytest.skip(str(absent))
    id = await fill_every(visit)
    await visit.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page = await visit.sign_in("")
    back = await page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (back == "rgb(20, 24, 23)") == (scheme == "dark")
    await page.evaluate(axe)
    await check_axe(page, "overview")
    for view in (*VIEWS[1:], f"m/shop/every/fragment/{id}"):
        await visit.go(view)
        if view.endswith("recall"):
            await page.get_by_label("Query", exact=True).fill("Who drinks green tea?")
            await page.keyboard.press("Enter")
            await page.locator(".explained summary").first.click()
        await check_axe(page, view)
    await page.get_by_role("button", name="Sign out").click()
    await check_axe(page, "sign in")


async def check_axe(page: object, view: str) -> None:
    found = await page.evaluate("axe.run(document, { resultTypes: ['violations'] })")  # type: ignore[attr-defined]
    broken = [
        (one["id"], node["target"], node["failureSummary"]) for one in found["violations"] for node in one["nodes"]
    ]
    assert broken == [], view


async def test_page_of_another_host_cannot_use_the_server(visit: Visit) -> None:
    """A page on another port of this machine: the server refuses its calls, and the browser its frame."""
    served = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = f"<title>other</title><iframe src='http://{visit.console.address}/'></iframe>".encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()
        if not served.done():
            served.set_result(None)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    page = visit.page
    await page.goto(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    await served
    url = f"http://{visit.console.address}/memstream.v1.ServerService/GetServerInfo"
    asked = f"fetch('{url}', {{method: 'POST', headers: {{'content-type': 'application/json'}}, body: '{{}}'}})"
    assert await page.evaluate(f"{asked}.then(() => 'read', () => 'refused')") == "refused"
    framed = page.frames[1]
    assert await framed.locator("#main").count() == 0
    await close_listener(server)
    assert any("frame-ancestors" in problem or "CORS" in problem for problem in visit.problems)
    visit.problems.clear()
