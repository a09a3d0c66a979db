"""One server with keys and an LLM, and one Chromium, for all tests of the console."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

import memstream
from memstream_server.rpc.access import keys
from tests.server.conftest import WITH_INDEX, check_log
from tests.support.fake_openai import FakeOpenAI
from tests.support.server import ServerProcess, free_address
from tests.toolchains import browser
from tests.toolchains.programs import Absent

POLICY = """
[[grant]]
who = ["key:root"]
namespaces = ["*"]
verbs = ["*"]

[[grant]]
who = ["key:reader"]
namespaces = ["shop"]
verbs = ["read", "recall"]
"""
WAIT_MS = 90_000
"""The longest wait of a page for what it must show."""


@dataclass
class Console:
    """The server, its keys, a client with all rights, the LLM's stand-in and the browser."""

    server: ServerProcess
    address: str
    keys: Mapping[str, str]
    client: memstream.Client
    llm: FakeOpenAI
    browser: Any


@dataclass
class Visit:
    """A page of the console, and what went wrong in it."""

    console: Console
    page: Any
    problems: list[str] = field(default_factory=list)
    """Errors of the page, violations of its security policy, and requests to other origins."""

    async def sign_in(self, path: str = "", key: str = "root", address: str = "") -> Any:
        """Opens the view of a path with that key. Returns the page."""
        page = self.page
        await page.goto(f"http://{address or self.console.address}/#/{path}")
        await page.get_by_label("API key").fill(self.console.keys[key])
        await page.get_by_role("button", name="Sign in").click()
        await page.locator(".view:not([aria-busy])").wait_for()
        return page

    async def go(self, path: str) -> Any:
        """Opens another view of the same page."""
        await self.page.evaluate("path => { location.hash = '#/' + path }", path)
        await self.page.locator(".view:not([aria-busy])").wait_for()
        return self.page


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def console(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Console]:
    try:
        options = browser.launch_options()
    except Absent as absent:
        pytest.skip(str(absent))
    from playwright.async_api import async_playwright

    folder, address = tmp_path_factory.mktemp("console"), free_address()
    keys_file, policy_file = folder / "keys.json", folder / "policy.toml"
    policy_file.write_text(POLICY)
    made = {name: keys.create_key(keys_file, name)[1] for name in ("root", "reader", "nobody")}
    async with FakeOpenAI() as llm, async_playwright() as playwright:
        llm.complete = _answer_nothing
        server = ServerProcess(folder / "data", http_listen=address).configure(
            **WITH_INDEX,
            api_keys_file=str(keys_file),
            access_policy_file=str(policy_file),
            llm_model="scripted",
            llm_base_url=llm.base_url,
            llm_api_key="sk",
            llm_scoring="false",
        )
        chromium = await playwright.chromium.launch(**options)
        with server:
            async with memstream.connect(server.address, token=made["root"]) as client:
                yield Console(server, address, made, client, llm, chromium)
            await chromium.close()
            assert server.stop() == 0
    check_log(server)
    assert not any(key in server.log() for key in made.values())


def _answer_nothing(body: Mapping[str, Any]) -> str:
    form = body["response_format"]["json_schema"]["name"]
    return json.dumps({form: []})


@pytest_asyncio.fixture(loop_scope="session")
async def visit(console: Console) -> AsyncIterator[Visit]:
    """A page that must end without an error, and without a request to another origin. Its memories end with it."""
    context = await console.browser.new_context(viewport={"width": 1280, "height": 800}, locale="en-US")
    context.set_default_timeout(WAIT_MS)
    page = await context.new_page()
    made = Visit(console, page)
    watch_problems(made, page)
    yield made
    await context.close()
    for namespace in [each.name async for each in console.client.list_namespaces()]:
        for memory in [each.name async for each in console.client.list_memories(namespace)]:
            await console.client.delete_memory(f"{namespace}/{memory}")
    assert made.problems == []


def watch_problems(made: Visit, page: Any) -> None:
    """Collects what the page does wrong. Failed loads are what tests of failures ask for: those are not collected."""

    def on_console(message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            made.problems.append(message.text)

    def on_request(request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:")):
            made.problems.append(f"a request to {request.url}")
        if any(key in request.url for key in made.console.keys.values()):
            made.problems.append("a key in an address")

    page.on("console", on_console)
    page.on("pageerror", lambda error: made.problems.append(str(error)))
    page.on("request", on_request)
