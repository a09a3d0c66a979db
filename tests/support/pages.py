"""The documents as tests see them: code blocks with their expected output, links, and a runner for a page's code.

Every code block is fenced and names its language; LANGUAGES says how each is tested. A ```text block right after a
block that runs is its expected output ("..." matches anything). A block that cannot run has `<!-- no-run: the reason
-->` on the line before it.

The ```python and ```sh blocks of a page run in order, in one folder. Python blocks share their names and one event
loop, and may await at top level, as in `python -m asyncio`. Shell blocks have `memstream` on their path and stop at the
first command that fails.

As a program (`python -m tests.support.pages PAGE ADDRESS FOLDER [DATA]`) this module runs a page's blocks against a
server.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "client/*/*.md", "deploy/**/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(pattern)
)
DEFAULT_ADDRESS = "127.0.0.1:7700"
"""The address in the documents; replaced by that of the test's server."""
DEFAULT_DATA = "/var/lib/memstream"
"""The data directory in the documents; replaced likewise."""
LANGUAGES = {
    "python": "run, in order",
    "sh": "run, in order; commands that do not run are checked",
    "go": "run, by tests/toolchains",
    "typescript": "run, by tests/toolchains",
    "java": "run, by tests/toolchains",
    "json": "parsed and validated",
    "toml": "parsed and validated: the first line names the file",
    "yaml": "parsed",
    "text": "output of the block before it, or not code: a figure, a formula",
}

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
_NO_RUN = re.compile(r"<!-- no-run: *(?P<reason>[^>]*?) *-->\n\Z")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: its line, its expected output (None: not given), the reason why it does not run (None: it
    runs)."""

    language: str
    line: int
    code: str
    output: str | None
    no_run: str | None


def find_blocks(text: str, *languages: str) -> Iterator[Block]:
    """The blocks of a page in the given languages (default: all), in order."""
    fences = list(_FENCE.finditer(text))
    for place, fence in enumerate(fences):
        if languages and fence["language"] not in languages:
            continue
        after = fences[place + 1] if place + 1 < len(fences) else None
        printed = after is not None and after["language"] == "text" and not text[fence.end() : after.start()].strip()
        marked = _NO_RUN.search(text[: fence.start()])
        yield Block(
            language=fence["language"],
            line=text.count("\n", 0, fence.start()) + 2,
            code=textwrap.dedent(fence["code"]),
            output=textwrap.dedent(after["code"]) if after is not None and printed else None,
            no_run=marked["reason"] if marked else None,
        )


def for_another_environment(text: str) -> str:
    """The page with its `no-run` marks before Python blocks removed, for an environment that can run them."""
    return re.sub(r"^<!-- no-run: [^>]*-->\n(?=```python)", "", text, flags=re.M)


def strip_blocks(text: str) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", text)


def links(text: str) -> list[str]:
    """Targets of the links outside of code."""
    return _LINK.findall(strip_blocks(text))


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    found = set()
    for heading in _HEADING.findall(strip_blocks(text)):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
        found.add(words.strip().replace(" ", "-"))
    return found


def printed_so(output: str, printed: str) -> bool:
    """Whether the output matches the documented output, in which "..." matches anything."""
    return doctest.OutputChecker().check_output(output, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


def run(page: Path, address: str, folder: Path, data: str = DEFAULT_DATA) -> list[str]:
    """Run a page's blocks in `folder` against the server at `address` with that data. Returns the first mismatch, if
    any."""
    names: dict[str, Any] = {"__name__": "__main__"}
    os.chdir(folder)
    with asyncio.Runner() as runner:
        for block in find_blocks(page.read_text("utf-8"), "python", "sh"):
            if block.no_run is not None:
                continue
            code = block.code.replace(DEFAULT_ADDRESS, address).replace(DEFAULT_DATA, data)
            if block.language == "sh":
                printed = _run_shell(code, address)
            else:
                # Blank lines keep the page's line numbers in tracebacks.
                printed = _run_python("\n" * (block.line - 1) + code, page, names, runner)
            if block.output is not None and not printed_so(block.output, printed):
                return [f"{page.name}:{block.line} prints\n{printed}instead of\n{block.output}"]
    return []


def _run_python(source: str, page: Path, names: dict[str, Any], runner: asyncio.Runner) -> str:
    out = io.StringIO()
    code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.redirect_stdout(out):
        result = eval(code, names)
        if inspect.iscoroutine(result):
            runner.run(result)
    return out.getvalue()


def _run_shell(code: str, address: str) -> str:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MEMSTREAM_TARGET": address,
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{code}ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def main() -> None:
    """Run the page in `sys.argv`; exits with the first mismatch."""
    wrong = run(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
