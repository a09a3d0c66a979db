"""Clients in other languages and a real server: conformance cases, golden bytes, TLS and tokens, lint, drift."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance import table
from tests.conformance.older import Older
from tests.conformance.world import CASES, GOLDEN, Runner, cases_for, names, run, said
from tests.server.conftest import MakeServer, check_log, make_server, started
from tests.support import pages
from tests.support.server import free_address
from tests.toolchains import languages
from tests.toolchains.front import Front, certificates
from tests.toolchains.languages import ROOT, Go
from tests.toolchains.programs import Absent

__all__ = ["make_server"]  # a fixture

pytestmark = pytest.mark.toolchain


def had(make: Callable[[], Runner]) -> Runner:
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
    return had(RUNNERS[request.param])


async def test_cases(runner: Runner, make_server: MakeServer) -> None:
    server = await started(make_server(listen=free_address()))
    found = await run(runner, cases_for(runner), server)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert list(found) == names(cases_for(runner))
    assert table.column(runner.language) == found.keys(), "write docs/conformance.md: python -m tests.conformance.table"
    check_log(server)


async def test_answers_are_asked_for_in_one_message(runner: Runner, make_server: MakeServer) -> None:
    if not runner.client:
        pytest.skip(f"{runner.language} has generated code only, which asks for nothing by itself")
    server = await started(make_server())
    async with Older(server.address) as older:
        found = await said(runner, "cases", older.address, [one for one in CASES if one.stem == "older_clients"])
    assert found
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert {opening.done_in_recollections for opening in older.openings} == {True}


async def test_golden_bytes(runner: Runner) -> None:
    found = await said(runner, "golden", "", GOLDEN)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len(found) == sum(len(json.loads(file.read_text("utf-8"))["messages"]) for file in GOLDEN)


async def test_mutual_tls_token_and_routing_header(runner: Runner, make_server: MakeServer, tmp_path: Path) -> None:
    if not runner.client:
        pytest.skip(f"{runner.language} has generated code only, which knows no tokens")
    certificates(tmp_path)
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
    assert languages.run(languages.needed("gofmt"), "-l", *files) == ""


def test_go_test() -> None:
    try:
        go = Go()
    except Absent as absent:
        pytest.skip(str(absent))
    assert "no tests to run" not in go.go("test", ".")


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


def generated(template: str, kept: str, plugins: Path, out: Path) -> None:
    """Generates anew under `out` and compares with what is kept."""
    languages.buf(template, plugins, out)
    fresh = {file.relative_to(out): file.read_bytes() for file in (out / kept).rglob("*") if file.is_file()}
    here = {file.relative_to(ROOT): file.read_bytes() for file in (ROOT / kept).rglob("*") if file.is_file()}
    assert fresh
    assert sorted(here) == sorted(fresh)
    assert [str(name) for name in here if here[name] != fresh[name]] == [], f"write them: buf generate {template}"


def test_the_generated_go_is_of_the_contract(tmp_path: Path) -> None:
    try:
        plugins = Go().plugins()
    except Absent as absent:
        pytest.skip(str(absent))
    generated("buf.gen.yaml", "client/go/memstream/v1", plugins, tmp_path)


def written_in(language: str) -> list[tuple[str, pages.Block]]:
    """Every block of the documents in a language, by page and line; those that may be run say what they print."""
    return [
        (f"{page.relative_to(ROOT)}:{block.line}", block)
        for page in pages.PAGES
        for block in pages.find_blocks(page.read_text("utf-8"), language)
        if block.no_run is None
    ]


async def ran(language: str, make_server: MakeServer, program: Callable[[str], str]) -> None:
    """Has `program` run every block of a language; what it prints is as the page says."""
    server = await started(make_server())
    found = written_in(language)
    assert found
    for where, block in found:
        printed = await asyncio.to_thread(program, block.code.replace(pages.DEFAULT_ADDRESS, server.address))
        assert block.output is not None, f"{where} does not say what it prints"
        assert pages.printed_so(block.output, printed), f"{where} prints\n{printed}"


async def test_the_go_of_the_documents_runs(make_server: MakeServer, tmp_path: Path) -> None:
    try:
        go = Go()
    except Absent as absent:
        pytest.skip(str(absent))

    def program(code: str) -> str:
        (tmp_path / "main.go").write_text(code, "utf-8")
        return go.go("run", str(tmp_path / "main.go"))

    await ran("go", make_server, program)


async def test_the_java_of_the_documents_runs(make_server: MakeServer, tmp_path: Path) -> None:
    try:
        java = languages.Java()
    except Absent as absent:
        pytest.skip(str(absent))

    def program(code: str) -> str:
        (tmp_path / "Main.java").write_text(code, "utf-8")
        return java.java(str(tmp_path / "Main.java"))

    await ran("java", make_server, program)


def test_the_generated_typescript_is_of_the_contract(tmp_path: Path) -> None:
    try:
        plugins = languages.node().bin
    except Absent as absent:
        pytest.skip(str(absent))
    generated("client/typescript/buf.gen.yaml", "client/typescript/src/gen", plugins, tmp_path)


async def test_the_typescript_of_the_documents_runs(make_server: MakeServer) -> None:
    try:
        node = languages.node()
    except Absent as absent:
        pytest.skip(str(absent))
    await ran("typescript", make_server, node.program)


def test_the_package_for_npm_has_the_client_alone() -> None:
    try:
        node = languages.node()
    except Absent as absent:
        pytest.skip(str(absent))
    assert node.built
    (packed,) = json.loads(languages.run(languages.needed("npm"), "pack", "--dry-run", "--json", cwd=node.folder))
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


def test_typescript_engines_and_ranges_are_true() -> None:
    """A user's Node.js is new enough for every dependency, and a newer patch of a dependency is taken."""
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
    """The least of ">=20.4"; a range that says it otherwise is for whoever adds it to read."""
    found = re.fullmatch(r">=\s*(\d+(?:\.\d+)*)", wanted)
    assert found, f"{wanted} is not read here"
    return tuple(map(int, found[1].split(".")))


async def test_the_generated_messages_work_with_grpc_js(make_server: MakeServer) -> None:
    try:
        node = languages.node()
    except Absent as absent:
        pytest.skip(str(absent))
    server = await started(make_server())
    printed = languages.run("node", str(node.built / "conformance" / "grpcjs.js"), server.address).splitlines()
    assert printed[0].startswith("hashing")
    assert "NOT_FOUND" in printed[1]
