"""Clients in other languages and a real server: conformance cases, golden bytes, TLS and tokens, lint, drift."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance import table
from tests.conformance.world import GOLDEN, Runner, cases_for, names, run, said
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


async def test_golden_bytes(runner: Runner) -> None:
    found = await said(runner, "golden", "", GOLDEN)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len(found) == sum(len(json.loads(file.read_text("utf-8"))["messages"]) for file in GOLDEN)


async def test_mutual_tls_token_and_routing_header(runner: Runner, make_server: MakeServer, tmp_path: Path) -> None:
    if not runner.client:
        pytest.skip(f"{runner.language} has generated code only, which knows no tokens")
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
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


def test_typescript_lint() -> None:
    try:
        languages.node().npm("lint")
    except Absent as absent:
        pytest.skip(str(absent))


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


async def test_the_readme_of_go_runs(make_server: MakeServer, tmp_path: Path) -> None:
    try:
        go = Go()
    except Absent as absent:
        pytest.skip(str(absent))
    server = await started(make_server())
    code, printed = pages.example(go.folder / "README.md", "go")
    program = tmp_path / "main.go"
    program.write_text(code.replace(pages.DEFAULT_ADDRESS, server.address), "utf-8")
    assert go.go("run", str(program)) == printed


def test_the_generated_typescript_is_of_the_contract(tmp_path: Path) -> None:
    try:
        plugins = languages.node().bin
    except Absent as absent:
        pytest.skip(str(absent))
    generated("client/typescript/buf.gen.yaml", "client/typescript/src/gen", plugins, tmp_path)


async def test_the_readme_of_typescript_runs(make_server: MakeServer) -> None:
    try:
        node = languages.node()
    except Absent as absent:
        pytest.skip(str(absent))
    server = await started(make_server())
    code, printed = pages.example(node.folder / "README.md", "typescript")
    program = node.built / "readme.mjs"
    program.write_text(code.replace(pages.DEFAULT_ADDRESS, server.address), "utf-8")
    assert languages.run("node", str(program), cwd=node.folder) == printed


async def test_the_generated_messages_work_with_grpc_js(make_server: MakeServer) -> None:
    try:
        node = languages.node()
    except Absent as absent:
        pytest.skip(str(absent))
    server = await started(make_server())
    printed = languages.run("node", str(node.built / "conformance" / "grpcjs.js"), server.address).splitlines()
    assert printed[0].startswith("hashing")
    assert "NOT_FOUND" in printed[1]
