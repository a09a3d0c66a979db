"""Clients in other languages with a real server: conformance cases, golden messages, TLS, tokens, lint, drift."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

import memstream
from tests.conformance import table
from tests.conformance.older import Older
from tests.conformance.world import CASES, GOLDEN, Runner, cases_for, names, run, said
from tests.server.conftest import MakeServer, check_log, make_server, started
from tests.support import pages
from tests.support.server import free_address
from tests.toolchains import languages
from tests.toolchains.front import Front, write_certificates
from tests.toolchains.languages import ROOT, Go
from tests.toolchains.programs import Absent

__all__ = ["make_server"]  # a fixture

pytestmark = pytest.mark.toolchain


def build_or_skip(make: Callable[[], Runner]) -> Runner:
    try:
        return make()
    except Absent as absent:
        pytest.skip(str(absent))


RUNNERS: dict[str, Callable[[], Runner]] = {
    "Python": lambda: languages.PYTHON,
    "Go": lambda: Go().runner(),
    "TypeScript": lambda: languages.node().runner(),
    "Java": lambda: languages.Java().runner(),
}


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> Runner:
    return build_or_skip(RUNNERS[request.param])


async def test_cases(runner: Runner, make_server: MakeServer) -> None:
    server = await started(make_server(listen=free_address()))
    found = await run(runner, cases_for(runner), server)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert list(found) == names(cases_for(runner))
    assert table.column(runner.language) == found.keys(), "write docs/conformance.md: python -m tests.conformance.table"
    check_log(server)


async def test_clients_request_answers_in_one_message(runner: Runner, make_server: MakeServer) -> None:
    if not runner.client:
        pytest.skip(f"{runner.language} has only generated code, which sets no field on its own")
    server = await started(make_server())
    async with Older(server.address) as older:
        found = await said(runner, "cases", older.address, [one for one in CASES if one.stem == "older_clients"])
    assert found
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert {opening.done_in_recollections for opening in older.openings} == {True}


async def test_golden_messages_decode_and_encode_unchanged(runner: Runner) -> None:
    found = await said(runner, "golden", "", GOLDEN)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len(found) == sum(len(json.loads(file.read_text("utf-8"))["messages"]) for file in GOLDEN)


async def test_mutual_tls_token_and_routing_header(runner: Runner, make_server: MakeServer, tmp_path: Path) -> None:
    if not runner.client:
        pytest.skip(f"{runner.language} has only generated code, which adds no tokens")
    write_certificates(tmp_path)
    server = await started(make_server())
    async with Front(server.address, tmp_path) as front:
        found = await said(runner, "secure", front.address, [tmp_path])
        assert found == {"mutual TLS and a token": "", "another token": "", "no certificate": ""}
        assert {method for method, _ in front.routes} >= {"CreateMemory", "Observe", "RecallOnce"}
        assert {route for _, route in front.routes} == {"secure/joy"}


def test_go_lint() -> None:
    try:
        go = Go()
    except Absent as absent:
        pytest.skip(str(absent))
    go.go("vet", "./...")
    assert go.go("mod", "tidy", "-diff") == ""
    files = [str(file) for file in go.folder.rglob("*.go")]
    assert languages.run(languages.find_program("gofmt"), "-l", *files) == ""


def test_go_test() -> None:
    try:
        go = Go()
    except Absent as absent:
        pytest.skip(str(absent))
    assert "no tests to run" not in go.go("test", ".")


IN_NODE, SECURE = "client/typescript/src/test/options.test.ts", "client/typescript/src/conformance/secure.ts"
EFFECTS = {
    "pingIntervalMs": (IN_NODE, "a server that answers no ping is noticed"),
    "pingTimeoutMs": (IN_NODE, "a server that answers no ping is noticed"),
    "readMaxBytes": (IN_NODE, "an answer may have some megabytes, and no more than 64"),
    "writeMaxBytes": (IN_NODE, "a message over writeBytesMax is not sent"),
    "ca": (SECURE, "mutual TLS and a token"),
    "cert": (SECURE, "no certificate"),
    "key": (SECURE, "mutual TLS and a token"),
    "servername": (IN_NODE, "the server gets the name that the client was given"),
}
"""The options of the TypeScript client's transport, and the test of the effect of each."""


def test_each_typescript_option_has_a_test_of_its_effect() -> None:
    text = (ROOT / "client/typescript/src/link.ts").read_text("utf-8")
    made = text[text.index("new Http2SessionManager(") : text.index("return { sessions")]
    given = text[text.index("function tlsOptions(") :]
    found = set(re.findall(r"\b(\w+): ", made)) | set(re.findall(r"&& { (\w+)", given))
    assert found - {"sessionManager"} == set(EFFECTS)
    for file, test in EFFECTS.values():
        assert test in (ROOT / file).read_text("utf-8"), f"{file} has no test {test!r}"


def test_typescript_lint() -> None:
    try:
        languages.node().npm("lint")
    except Absent as absent:
        pytest.skip(str(absent))


def test_typescript_test() -> None:
    try:
        node = languages.node()
    except Absent as absent:
        pytest.skip(str(absent))
    assert node.built
    assert re.search(r"^# pass [1-9]", node.npm("test"), re.MULTILINE)


def check_generated(template: str, kept: str, plugins: Path, out: Path) -> None:
    """Generates into `out` and compares the result with the committed files."""
    languages.buf(template, plugins, out)
    fresh = {file.relative_to(out): file.read_bytes() for file in (out / kept).rglob("*") if file.is_file()}
    here = {file.relative_to(ROOT): file.read_bytes() for file in (ROOT / kept).rglob("*") if file.is_file()}
    assert fresh
    assert sorted(here) == sorted(fresh)
    assert [str(name) for name in here if here[name] != fresh[name]] == [], f"write them: buf generate {template}"


def test_the_generated_go_matches_the_contract(tmp_path: Path) -> None:
    try:
        plugins = Go().plugins()
    except Absent as absent:
        pytest.skip(str(absent))
    check_generated("buf.gen.yaml", "client/go/memstream/v1", plugins, tmp_path)


def blocks_in(language: str) -> list[tuple[str, pages.Block]]:
    """Returns the code blocks of the documents in a language that can run, by page and line."""
    return [
        (f"{page.relative_to(ROOT)}:{block.line}", block)
        for page in pages.PAGES
        for block in pages.find_blocks(page.read_text("utf-8"), language)
        if block.no_run is None
    ]


async def run_blocks(language: str, make_server: MakeServer, program: Callable[[str], str]) -> None:
    """Runs every block of a language with `program` and compares its output with the page."""
    server = await started(make_server())
    found = blocks_in(language)
    assert found
    for where, block in found:
        printed = await asyncio.to_thread(program, block.code.replace(pages.DEFAULT_ADDRESS, server.address))
        assert block.output is not None, f"{where} has no expected output"
        assert pages.printed_so(block.output, printed), f"{where} prints\n{printed}"


async def test_go_code_of_the_documents_runs(make_server: MakeServer, tmp_path: Path) -> None:
    try:
        go = Go()
    except Absent as absent:
        pytest.skip(str(absent))

    def program(code: str) -> str:
        (tmp_path / "main.go").write_text(code, "utf-8")
        return go.go("run", str(tmp_path / "main.go"))

    await run_blocks("go", make_server, program)


async def test_java_code_of_the_documents_runs(make_server: MakeServer, tmp_path: Path) -> None:
    try:
        java = languages.Java()
    except Absent as absent:
        pytest.skip(str(absent))

    def program(code: str) -> str:
        (tmp_path / "Main.java").write_text(code, "utf-8")
        return java.java(str(tmp_path / "Main.java"))

    await run_blocks("java", make_server, program)


def test_the_generated_typescript_matches_the_contract(tmp_path: Path) -> None:
    try:
        plugins = languages.node().bin
    except Absent as absent:
        pytest.skip(str(absent))
    check_generated("client/typescript/buf.gen.yaml", "client/typescript/src/gen", plugins, tmp_path)


async def test_typescript_code_of_the_documents_runs(make_server: MakeServer) -> None:
    try:
        node = languages.node()
    except Absent as absent:
        pytest.skip(str(absent))
    await run_blocks("typescript", make_server, node.program)


def test_the_npm_package_has_only_the_client() -> None:
    try:
        node = languages.node()
    except Absent as absent:
        pytest.skip(str(absent))
    assert node.built
    (packed,) = json.loads(languages.run(languages.find_program("npm"), "pack", "--dry-run", "--json", cwd=node.folder))
    names = {file["path"] for file in packed["files"]}
    assert names >= {"LICENSE", "README.md", "package.json", "dist/index.js", "dist/index.d.ts"}
    assert not [name for name in names if "conformance" in name or name.startswith(("src/", "dist/test/"))]


CONSUMER = """
import { connect, MemstreamError } from "@memstream/client";
import type { Settings } from "@memstream/client";
import { asError } from "@memstream/client/errors";
import { ErrorReason } from "@memstream/client/v1/error";

const settings: Settings = { token: () => Promise.resolve("t"), tls: { ca: new Uint8Array(), servername: "x" } };
const client = connect("127.0.0.1:7700", settings);
const memory = await client.ensureMemory("demo/joy");
const stream = await memory.observe("p", { signal: new AbortController().signal });
await stream.send("tea");
await stream[Symbol.asyncDispose]();
for await (const { event } of memory.watch()) event.type satisfies number;
try {
  await memory.recallOnce("tea", { timeoutMs: 5 });
} catch (error) {
  if (error instanceof MemstreamError && error.reason === ErrorReason.MEMORY_NOT_FOUND) throw asError(error);
}
"""


@pytest.mark.parametrize("target", ["es2022", "esnext"])
def test_typescript_types_compile_without_types_node(target: str) -> None:
    try:
        languages.node().consume(CONSUMER, target)
    except Absent as absent:
        pytest.skip(str(absent))


def test_typescript_engines_and_version_ranges_are_correct() -> None:
    """The Node.js in `engines` is new enough for every dependency, and ranges admit newer patches of dependencies."""
    try:
        node = languages.node()
    except Absent as absent:
        pytest.skip(str(absent))
    assert all(wanted[0] in "^~" for wanted in node.package["dependencies"].values())
    least = _first_version(node.package["engines"]["node"])
    needs = {path: one["engines"]["node"] for path, one in node.locked.items() if "node" in one.get("engines", {})}
    assert needs
    assert {path: need for path, need in needs.items() if _first_version(need) > least} == {}


def _first_version(wanted: str) -> tuple[int, ...]:
    """Returns the version of ">=20.4"; fails for other kinds of ranges, which this does not parse."""
    found = re.fullmatch(r">=\s*(\d+(?:\.\d+)*)", wanted)
    assert found, f"cannot parse {wanted}"
    return tuple(map(int, found[1].split(".")))


CONTEXTS = """
import { readFileSync } from "node:fs";
import { connect } from "@memstream/client";
import { asError } from "@memstream/client/errors";

const client = connect("127.0.0.1:7700");
const { scopes, question, reply, conversation, blocks, position, invalid } = JSON.parse(readFileSync("GIVEN", "utf8"));
const now = new Date("2026-05-08T00:00:00Z");
const after = Uint8Array.from(Buffer.from(position, "base64"));
const turn = await client.context(scopes, question, { conversation, blocks, budget: 900, after, now });
const system = "You are Joy.";
const openai = [turn.toOpenAI({ system }), turn.toOpenAIChat({ system })];
const forms = [turn.toAnthropic({ system }), turn.toAnthropic(), ...openai];
const counts = [turn.tokens, turn.unchangedTokens, turn.brokenBy.length];
const cited = turn.citations.map((one) => one.fragmentId);
const stream = await client.memory(scopes[0]).recall();
const streamed = await stream.context(question, { conversation, blocks, budget: 900, after, now });
const refused = await stream.context(question, { tokenizer: "words" }).catch((error) => asError(error).code);
await stream.close();
await turn.record(question, reply);
const bare = await client.context(scopes, question, { now });
const field = (error: unknown): string => asError(error).violations.map((one) => one.field).join();
const fields: string[] = [];
for (const options of invalid) {
  await client.context(scopes, question, options).catch((error) => fields.push(field(error)));
}
const nowhere = await client.context([], question);
await nowhere.record(question, reply).catch((error) => fields.push(field(error)));
const next = Buffer.from(turn.position).toString("base64");
const same = streamed.text === turn.text;
console.log(JSON.stringify([turn.text, counts, cited, forms, bare.toOpenAI(), next, fields, same, refused]));
client.close();
"""
"""Records a turn with the TypeScript client, and prints its forms and the fields of invalid options."""

INVALID = [{"budjet": 1}, {"budget": "1"}, {"blocks": "x"}, {"now": "x"}, {"partsTimeoutMs": "x"}, {"filter": {"x": 1}}]
FIELDS = "budjet budget blocks now partsTimeoutMs filter.x memory"
SAID = {"assistant": "hello\n\n", "user": "\x1f \x85", "tool": '{"rain": 1}', "other": "\ufeff"}


async def test_typescript_contexts_are_those_of_python(make_server: MakeServer, tmp_path: Path) -> None:
    try:
        node = languages.node()
    except Absent as absent:
        pytest.skip(str(absent))
    server = await started(make_server())
    async with memstream.connect(server.address) as client:
        bob = await client.create_memory("people/bob")
        await bob.observe_batch([memstream.Observation("I live in Paris", speaker="Bob"), "Bob eats no nuts"])
        await bob.blocks.put("persona", "You are “Joy” <memstream>\n")
        talk = client.conversation("people/monday")
        await talk.append_messages([memstream.NewMessage(role=role, content=text) for role, text in SAID.items()])
        blocks, now = ["people/bob#persona"], datetime(2026, 5, 8, tzinfo=UTC)
        scopes, question, reply = ["people/bob"], "Where does Bob live?", "in Paris \u2028 \U0001f980"

        async def ask(what: str, after: memstream.Context | None) -> memstream.Context:
            return await client.context(
                scopes, what, conversation="people/monday", blocks=blocks, budget=900, after=after, now=now
            )

        first = await ask("What does Bob eat?", None)
        await first.record("What does Bob eat?", "no nuts")
        turn = await ask(question, first)
        position = base64.b64encode(first.position).decode()
        given = {"scopes": scopes, "question": question, "reply": reply, "conversation": "people/monday"}
        file = tmp_path / "given.json"
        file.write_text(json.dumps(given | {"blocks": blocks, "position": position, "invalid": INVALID}), "utf-8")
        code = CONTEXTS.replace("GIVEN", str(file)).replace(pages.DEFAULT_ADDRESS, server.address)
        printed = await asyncio.to_thread(node.program, code)
        assert turn.unchanged_tokens == first.tokens
        stored = [one.id async for one in bob.list_fragments()]
        await turn.record(question, reply)  # the same turn, so that nothing is stored again
        assert [one.id async for one in bob.list_fragments()] == stored
        assert len([one async for one in talk.messages()]) == len(SAID) + 4
        bare = await client.context(scopes, question, now=now)
    assert printed == _as_json(turn, bare) + "\n"


def _as_json(turn: memstream.Context, bare: memstream.Context) -> str:
    """What CONTEXTS prints for these contexts."""
    system = "You are Joy."
    forms = [turn.to_anthropic(system=system), turn.to_anthropic(), turn.to_openai(system=system)]
    counts = [turn.tokens, turn.unchanged_tokens, len(turn.broken_by)]
    cited = [one.fragment_id for one in turn.citations]
    fields = [f"options.{field}" for field in FIELDS.split()]
    next_position = base64.b64encode(turn.position).decode()
    whole = [
        turn.text,
        counts,
        cited,
        [*forms, turn.to_openai_chat(system=system)],
        bare.to_openai(),
        next_position,
        fields,
        True,  # the stream's text is the same
        3,  # INVALID_ARGUMENT
    ]
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


async def test_the_generated_messages_work_with_grpc_js(make_server: MakeServer) -> None:
    try:
        node = languages.node()
    except Absent as absent:
        pytest.skip(str(absent))
    server = await started(make_server())
    printed = languages.run("node", str(node.built / "conformance" / "grpcjs.js"), server.address).splitlines()
    assert printed[0].startswith("hashing")
    assert "NOT_FOUND" in printed[1]
