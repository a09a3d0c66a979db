"""The console while the server restarts, after a key is revoked, on an empty server, in many tabs, and its programs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import memstream
from memstream_server.rpc.access import keys
from tests.server.conftest import QUICK, started, stopped
from tests.server.test_missing_vectors import spoil_odd
from tests.server.test_models import settings_for
from tests.support.certificates import Authority
from tests.support.fake_openai import FakeOpenAI, Fault
from tests.support.server import ServerProcess, free_address
from tests.toolchains import deploying, languages
from tests.toolchains.console.conftest import WAIT_MS, Console, Visit
from tests.toolchains.console.test_edges import VIEWS, fill_every
from tests.toolchains.envoy import Envoy
from tests.toolchains.programs import Absent

pytestmark = [pytest.mark.toolchain, pytest.mark.asyncio(loop_scope="session")]
TABS = 9


@pytest_asyncio.fixture(loop_scope="session")
async def page(console: Console) -> AsyncIterator[Any]:
    """A page in a context of its own, without a server."""
    context = await console.browser.new_context(viewport={"width": 1280, "height": 800}, locale="en-US")
    context.set_default_timeout(WAIT_MS)
    yield await context.new_page()
    await context.close()


async def test_view_recovers_when_the_server_is_back(page: Any, tmp_path: Path) -> None:
    address = free_address()
    server = ServerProcess(tmp_path / "data", http_listen=address, **QUICK)
    with server:
        async with memstream.connect(server.address) as client:
            await (await client.create_memory("shop/back")).observe_batch(["Ann drinks tea."])
        await page.goto(f"http://{address}/#/m/shop/back")
        await page.get_by_text("Ann drinks tea.").wait_for()
        assert server.stop() == 0
        await page.get_by_role("link", name="Timeline").click()
        await page.get_by_role("alert").get_by_text("The server does not answer.").wait_for()
    with ServerProcess(tmp_path / "data", http_listen=address, **QUICK):
        await page.locator(".timeline li", has_text="Ann drinks tea.").wait_for()


async def test_page_that_was_half_loaded_loads_again(page: Any, visit: Visit) -> None:
    """The server goes away between the page and its modules."""
    lost = True

    async def cut(route: Any) -> None:
        await (route.abort() if lost else route.continue_())

    await page.route("**/console/app.js", cut)
    await page.goto(f"http://{visit.console.address}/#/server")
    await page.get_by_text("The server does not answer yet.").wait_for()
    lost = False
    await page.get_by_label("API key").wait_for()


async def test_revoked_key_asks_to_sign_in_and_returns_to_the_view(page: Any, tmp_path: Path) -> None:
    address, keys_file, policy_file = free_address(), tmp_path / "keys.json", tmp_path / "policy.toml"
    policy_file.write_text('[[grant]]\nwho = ["key:*"]\nnamespaces = ["*"]\nverbs = ["*"]\n')
    made, first = keys.create_key(keys_file, "first")
    second = keys.create_key(keys_file, "second")[1]
    settings = QUICK | {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    with ServerProcess(tmp_path / "data", http_listen=address, **settings) as server:
        async with memstream.connect(server.address, token=second) as client:
            await (await client.create_memory("shop/revoked")).observe_batch(["Ann drinks tea."])
            await page.goto(f"http://{address}/#/m/shop/revoked/live")
            await page.get_by_label("API key").fill(first)
            await page.keyboard.press("Enter")
            await page.locator("[data-state=live]").wait_for()
            keys.revoke_key(keys_file, made.id)
            await page.get_by_text("The server no longer takes this key").wait_for()
            await page.get_by_label("API key").fill(second)
            await page.keyboard.press("Enter")
            await page.locator("[data-state=live]").wait_for()


async def test_empty_server_says_how_to_begin(page: Any, tmp_path: Path) -> None:
    address = free_address()
    with ServerProcess(tmp_path / "data", http_listen=address, **QUICK) as server:
        await page.goto(f"http://{address}/")
        await page.get_by_text("This server is empty.").wait_for()
        for program in await page.locator("pre").all_text_contents():
            code = program.replace("127.0.0.1:7700", server.address)
            command = [sys.executable, "-c", code] if code.startswith("import") else ["bash", "-c", code]
            done = await run(command)
            assert "Bob drinks green tea." in done.stdout, done.stderr
        await page.reload()
        await page.get_by_role("link", name="demo", exact=True).wait_for()


async def test_more_live_tabs_than_connections_all_go_on(visit: Visit) -> None:
    memory = await visit.console.client.create_memory("shop/tabs")
    first = await visit.sign_in("m/shop/tabs/live")
    await first.locator("[data-state=live]").wait_for()
    tabs = [first]
    for _ in range(TABS - 1):
        tab = await first.context.new_page()
        await tab.goto(f"http://{visit.console.address}/#/m/shop/tabs/live")
        await tab.get_by_label("API key").fill(visit.console.keys["reader"])
        await tab.keyboard.press("Enter")
        await tab.locator("[data-state=live]").wait_for()
        assert await tab.evaluate("performance.getEntriesByType('navigation')[0].nextHopProtocol") != "h2"
        tabs.append(tab)
    await memory.observe_batch(["Ann arrives in every tab."])
    for tab in tabs:
        await tab.locator(".card", has_text="Ann arrives").wait_for()
        assert await tab.locator(".card", has_text="Ann arrives").count() == 1
    await tabs[-1].get_by_role("link", name="Recall").click()
    await tabs[-1].get_by_label("Query", exact=True).fill("Who arrives?")
    await tabs[-1].keyboard.press("Enter")
    await tabs[-1].locator(".ranking > li").first.wait_for()
    for tab in tabs[1:]:
        await tab.close()


async def run(command: list[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "timeout": 60}
    return await asyncio.to_thread(subprocess.run, command, env=environment, check=False, **options)


async def copied(page: Any, language: str, call: str) -> str:
    """The program of a call of the view."""
    box = page.locator("details.copies")
    if await box.get_attribute("open") is None:
        await box.locator("summary").click()
    await box.get_by_label("Call").select_option(label=call)
    await box.get_by_label("Language").select_option(language)
    return str(await box.locator("pre").text_content())


async def test_nine_live_tabs_stream_over_one_http2_connection(console: Console, tmp_path: Path) -> None:
    """Through Envoy with deploy/envoy/console.yaml; without it tabs beyond three streams read in turns."""
    try:
        envoy_program = await asyncio.to_thread(deploying.find_envoy)
    except Absent as absent:
        pytest.skip(str(absent))
    certificate, key = Authority(tmp_path).issue("console")

    def use_certificate(configuration: dict[str, Any]) -> None:
        (chain,) = configuration["static_resources"]["listeners"][0]["filter_chains"]
        tls = chain["transport_socket"]["typed_config"]["common_tls_context"]
        files = {"certificate_chain": certificate, "private_key": key}
        tls["tls_certificates"] = [{name: {"filename": str(path)} for name, path in files.items()}]

    memory = await console.client.create_memory("shop/streams")
    context = await console.browser.new_context(ignore_https_errors=True, locale="en-US")
    context.set_default_timeout(WAIT_MS)
    with Envoy(envoy_program, tmp_path, [console.address], configured="console.yaml", change=use_certificate) as envoy:
        await until(lambda: envoy.healthy_servers() == {console.address})
        tabs = []
        for _ in range(TABS):
            tab = await context.new_page()
            await tab.goto(f"https://{envoy.address}/#/m/shop/streams/live")
            await tab.get_by_label("API key").fill(console.keys["reader"])
            await tab.keyboard.press("Enter")
            await tab.locator("[data-state=live]").wait_for()
            assert await tab.evaluate("performance.getEntriesByType('navigation')[0].nextHopProtocol") == "h2"
            tabs.append(tab)
        await memory.observe_batch(["Ann arrives in every tab."])
        for tab in tabs:
            await tab.locator(".card", has_text="Ann arrives").wait_for()
        assert (await console.client.server_status()).streams["Watch"] >= TABS, "each tab has a stream of its own"
    await context.close()


async def test_first_page_names_quota_models_and_failures(page: Any, tmp_path: Path) -> None:
    address, most = free_address(), 200_000
    async with FakeOpenAI() as llm:
        llm.complete = lambda body: "no JSON"
        llm.fail(*[Fault(status=500)] * 1_000)
        settings = {"llm_model": "scripted", "llm_base_url": llm.base_url, "llm_api_key": "sk", "llm_timeout_s": 1}
        with ServerProcess(
            tmp_path / "data", http_listen=address, **QUICK, **settings, namespace_bytes_max=most, llm_scoring="false"
        ) as server:
            async with memstream.connect(server.address) as client:
                full = await client.create_memory("full/joy", policy={"conflicts": {"ask_llm": True}})
                for place in ("Munich", "Berlin"):
                    await full.observe_batch([memstream.Observation(f"I live in {place} now.", speaker="Ann")])
                await fill(client, 0.6)
                with pytest.raises(memstream.QuotaExceeded):
                    await client.finished(await client.import_("full", export(client), memory="copy"))
                await fill(client, 0.95)
                await page.goto(f"http://{address}/")
                decisions = page.locator(".decisions li")
                await decisions.filter(has_text="full uses 9").get_by_text("quota", exact=True).wait_for()
                await decisions.filter(has_text="import of full").get_by_text("failed", exact=True).wait_for()
                model = decisions.filter(has_text="(scripted) fails").get_by_text("model", exact=True)
                while not await model.count():
                    await page.reload()
                    await page.locator(".view:not([aria-busy])").wait_for()


async def fill(client: memstream.Client, share: float) -> None:
    """Observes until the namespace has that share of its quota."""
    for number in range(1_000):
        (full,) = [one async for one in client.list_namespaces()]
        if full.stored.total >= share * full.bytes_max:
            return
        await client.memory("full/joy").observe_batch([f"{number} {'tea ' * 500}"])


async def export(client: memstream.Client) -> AsyncIterator[bytes]:
    async for part in client.export("full", "joy"):
        yield part.lines


async def until(holds: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + WAIT_MS / 1_000
    while not await asyncio.to_thread(holds):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)


async def copy_all(page: Any) -> dict[tuple[str, str], str]:
    """The programs of all calls of the view, by language and call."""
    found = {}
    await page.locator("details.copies summary").click()
    await page.locator("details.copies pre").wait_for()
    calls = await page.locator("details.copies").get_by_label("Call").locator("option").all_text_contents()
    for call in dict.fromkeys(calls):
        for language in ("curl", "python", "typescript"):
            found[language, call] = await copied(page, language, call)
    return found


async def first_output(command: Sequence[str], environment: Mapping[str, str], streams: bool) -> str:
    """The output of a program; of one that reads a stream, the output up to its first lines."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(3 * WAIT_MS / 1_000):
            if streams:
                return (await process.stdout.read(1_000)).decode(errors="replace")
            out, error = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # curl is a child of the shell
        await process.wait()
    assert process.returncode == 0, f"{command[-1]}\n{error.decode()}"
    return out.decode()


async def test_each_copied_program_of_each_view_runs(visit: Visit, tmp_path: Path) -> None:
    try:
        node = await asyncio.to_thread(languages.node)
    except Absent as absent:
        pytest.skip(str(absent))
    console, id = visit.console, await fill_every(visit)
    environment = os.environ | {"MEMSTREAM_TOKEN": console.keys["root"], "MEMSTREAM_TARGET": console.server.address}
    await visit.sign_in("")
    programs: dict[tuple[str, str], str] = {}
    for view in (*VIEWS, f"m/shop/every/fragment/{id}"):
        page = await visit.go(view)
        if view.endswith("recall"):
            await page.get_by_label("Query", exact=True).fill("Who drinks green tea?")
            await page.keyboard.press("Enter")
            await page.locator(".ranking > li").first.wait_for()
        await page.locator("[data-state=live]").first.wait_for() if view.endswith("live") else None
        programs |= await copy_all(page)
    calls = {call for _, call in programs}
    assert {"StreamService/RecallOnce", "StreamService/Watch", "MemoryService/ListFragments"} <= calls
    assert not any(key in code for code in programs.values() for key in console.keys.values())
    typescript = {call: code for (language, call), code in programs.items() if language == "typescript"}
    compiled = await asyncio.to_thread(node.compile_programs, dict(enumerate(typescript.values())))
    scripts = dict(zip(typescript, compiled.values(), strict=True))
    try:
        for (language, call), code in programs.items():
            command = {
                "curl": ["bash", "-c", code],
                "python": [sys.executable, "-c", code],
                "typescript": ["node", str(scripts[call])],
            }[language]
            streams = call in ("StreamService/Watch", "ConversationService/WatchMessages")
            printed = await first_output(command, environment, streams)
            assert printed.strip(), (language, call)
            assert language != "curl" or streams or "code" not in json.loads(printed), (call, printed)
    finally:
        shutil.rmtree(scripts["StreamService/Watch"].parent)


async def test_copied_programs_do_what_the_view_did(visit: Visit) -> None:
    console = visit.console
    memory = await console.client.create_memory("shop/copied")
    await memory.observe_batch(["Ann's kettle: green tea \u2615", "Bob sells maps."])
    environment = os.environ | {
        "MEMSTREAM_TOKEN": console.keys["reader"],
        "MEMSTREAM_TARGET": console.server.address,
    }
    page = await visit.sign_in("m/shop/copied/recall?text=What's in Ann's kettle?&limit=1", key="reader")
    await page.locator(".ranking > li").first.wait_for()
    for language, program in (("curl", ["bash", "-c"]), ("python", [sys.executable, "-c"])):
        code = await copied(page, language, "StreamService/RecallOnce")
        assert console.keys["reader"] not in code
        done = await run([*program, code], environment)
        answer = json.loads(done.stdout)
        assert answer["recollections"]["recollections"][0]["fragment"]["content"].startswith("Ann's kettle"), language
    code = await copied(page, "typescript", "StreamService/RecallOnce")
    assert "RecallOnceRequestSchema" in code
    assert "client.streams.recallOnce(request)" in code
    await visit.go("m/shop/copied/live")
    await page.locator("[data-state=live]").wait_for()
    code = await copied(page, "curl", "StreamService/Watch")
    printed = await first_output(["bash", "-c", code], environment, streams=True)
    assert '"progress"' in printed or '"events"' in printed


async def test_console_counts_what_has_no_vector(page: Any, tmp_path: Path) -> None:
    address = free_address()
    async with FakeOpenAI(dimension=16) as endpoint:
        endpoint.spoil = spoil_odd
        settings = QUICK | settings_for(endpoint)
        server = await started(ServerProcess(tmp_path / "data", http_listen=address, **settings))
        try:
            async with memstream.connect(server.address) as client:
                memory = await client.create_memory("shop/odd")
                await memory.observe_batch(["Ann drinks tea.", "an odd one"])
            await page.goto(f"http://{address}/")
            await page.get_by_text("1 without a vector").wait_for()
            for view, text in (("", "without a vector 1"), ("/live", "no vector 1")):
                await page.goto(f"http://{address}/#/m/shop/odd{view}")
                await page.locator(".numbers", has_text=text).wait_for()
            assert await stopped(server) == 0
        finally:
            server.kill()
