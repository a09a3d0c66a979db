"""The documents as tests see them: their code blocks, what those print, their links; and a run of a page's code.

Every code block is fenced and says its language; LANGUAGES says what is done with each. A ```text block right after
one that is run is what that prints ("..." stands for anything). A block that cannot be run has
`<!-- no-run: the reason -->` on the line before it.

The ```python and ```sh blocks of a page are run in order, in one folder. The former share their names and one event
loop, and may await at their top level, as in `python -m asyncio`; the latter have `memstream` on their path, and are
ended by the first command that fails.

As a program (`python -m tests.support.pages PAGE ADDRESS FOLDER [DATA]`) it runs a page's blocks against a server.
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
"""What the documents connect to; the address of the test's server takes its place."""
DEFAULT_DATA = "/var/lib/memstream"
"""Where the documents' server keeps its data; likewise."""
LANGUAGES = {
    "python": "run, in order",
    "sh": "run, in order; of what is not run the commands are checked",
    "go": "run, by tests/toolchains",
    "typescript": "run, by tests/toolchains",
    "java": "run, by tests/toolchains",
    "json": "read as what it is",
    "toml": "read as what it is: the first line names the file",
    "yaml": "read",
    "text": "what the block before it prints, or not code: a figure, a formula",
}

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
_NO_RUN = re.compile(r"<!-- no-run: *(?P<reason>[^>]*?) *-->\n\Z")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: where it stands, what it prints (None: not said), why it is not run (None: it is)."""

    language: str
    line: int
    code: str
    output: str | None
    no_run: str | None


def blocks(text: str, *languages: str) -> Iterator[Block]:
    """The blocks of a page in some languages (none: in all), in order."""
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
    """A page whose Python is run although it is marked: where it can be."""
    return re.sub(r"^<!-- no-run: [^>]*-->\n(?=```python)", "", text, flags=re.M)


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", text)


def links(text: str) -> list[str]:
    """Targets of the links outside of code."""
    return _LINK.findall(prose(text))


def anchors(text: str) -> set[str]:
    """Names of the headings, as GitHub makes them."""
    found = set()
    for heading in _HEADING.findall(prose(text)):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
        found.add(words.strip().replace(" ", "-"))
    return found


def printed_so(output: str, printed: str) -> bool:
    """Whether what was printed is what a page says, "..." standing for anything."""
    return doctest.OutputChecker().check_output(output, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


def run(page: Path, address: str, folder: Path, data: str = DEFAULT_DATA) -> list[str]:
    """Run a page's blocks in a folder, against the server at `address` with that data; what went wrong, if anything."""
    names: dict[str, Any] = {"__name__": "__main__"}
    os.chdir(folder)
    with asyncio.Runner() as runner:
        for block in blocks(page.read_text("utf-8"), "python", "sh"):
            if block.no_run is not None:
                continue
            code = block.code.replace(DEFAULT_ADDRESS, address).replace(DEFAULT_DATA, data)
            if block.language == "sh":
                printed = _shell(code, address)
            else:
                # Line numbers as in the page, for whoever reads a traceback.
                printed = _python("\n" * (block.line - 1) + code, page, names, runner)
            if block.output is not None and not printed_so(block.output, printed):
                return [f"{page.name}:{block.line} prints\n{printed}instead of\n{block.output}"]
    return []


def _python(source: str, page: Path, names: dict[str, Any], runner: asyncio.Runner) -> str:
    out = io.StringIO()
    code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.redirect_stdout(out):
        result = eval(code, names)
        if inspect.iscoroutine(result):
            runner.run(result)
    return out.getvalue()


def _shell(code: str, address: str) -> str:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MEMSTREAM_TARGET": address,
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{code}ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    wrong = run(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
    sys.exit("\n".join(wrong) or None)
