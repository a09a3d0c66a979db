"""The documents as tests see them: their code blocks, what those print, their links; and a run of a page's code.

A ```python block is run; a ```text block right after it is what it prints ("..." stands for anything). A block that
cannot be run has `<!-- no-run: the reason -->` on the line before it. The blocks of a page share their names and one
event loop, and may await at their top level, as in `python -m asyncio`.

As a program (`python -m tests.support.pages PAGE ADDRESS`) it runs a page's blocks against a server, in order.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")) if page.is_file()
)
DEFAULT_ADDRESS = "127.0.0.1:7700"
"""What the documents connect to; the address of the test's server takes its place."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_NO_RUN = re.compile(r"<!-- no-run: *(?P<reason>[^>]*?) *-->\n\Z")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of Python: where it stands, what it prints (None: not said), why it is not run ("": it is)."""

    line: int
    code: str
    output: str | None
    no_run: str | None


def blocks(text: str) -> Iterator[Block]:
    """The Python blocks of a page, in order."""
    fences = list(_FENCE.finditer(text))
    for place, fence in enumerate(fences):
        if fence[1] != "python":
            continue
        after = fences[place + 1] if place + 1 < len(fences) else None
        printed = after is not None and after[1] == "text" and not text[fence.end() : after.start()].strip()
        marked = _NO_RUN.search(text[: fence.start()])
        yield Block(
            line=text.count("\n", 0, fence.start()) + 2,
            code=fence[2],
            output=after[2] if after is not None and printed else None,
            no_run=marked["reason"] if marked else None,
        )


def examples(page: Path, language: str) -> list[tuple[str, str]]:
    """A page's programs in another language, in order, with what they print, in the block after ("" if not said)."""
    text = page.read_text("utf-8")
    fences = list(_FENCE.finditer(text))
    found = []
    for fence, after in zip(fences, [*fences[1:], None], strict=True):
        if fence[1] == language:
            printed = after is not None and after[1] == "text" and not text[fence.end() : after.start()].strip()
            found.append((fence[2], after[2] if after is not None and printed else ""))
    return found


def example(page: Path, language: str) -> tuple[str, str]:
    """The one of a page that has one."""
    (one,) = examples(page, language)
    return one


def prints(expected: str, printed: str) -> bool:
    """Whether this was printed; "..." stands for anything."""
    return doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


def links(text: str) -> list[str]:
    """Targets of the links outside of code."""
    return _LINK.findall(_FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """Names of the headings, as GitHub makes them."""
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
        found.add(words.strip().replace(" ", "-"))
    return found


def run(page: Path, address: str) -> list[str]:
    """Run a page's blocks against the server at `address`; what went wrong, if anything."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for block in blocks(page.read_text("utf-8")):
            if block.no_run is not None:
                continue
            out, where = io.StringIO(), f"{page.name}:{block.line}"
            # Line numbers as in the page, for whoever reads a traceback.
            source = "\n" * (block.line - 1) + block.code.replace(DEFAULT_ADDRESS, address)
            code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            with contextlib.redirect_stdout(out):
                result = eval(code, names)
                if inspect.iscoroutine(result):
                    runner.run(result)
            if block.output is not None and not prints(block.output, out.getvalue()):
                return [f"{where} prints\n{out.getvalue()}instead of\n{block.output}"]
    return []


if __name__ == "__main__":
    wrong = run(Path(sys.argv[1]), sys.argv[2])
    sys.exit("\n".join(wrong) or None)
