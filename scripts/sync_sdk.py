"""Write the blocking SDK, client/memstream/sync, from the asynchronous classes (`--check` only compares).

A method of the asynchronous class becomes one with the same arguments, defaults, types and docstring that runs it on
the background loop: a coroutine is awaited, an asynchronous iterator becomes an iterator, and an object of a class that
has a blocking counterpart is wrapped. What has no counterpart is written by hand: the loop, the base classes in
memstream.sync.bases, `connect` and `local`. AgentMemory is its asynchronous code without `async` and `await`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SYNC = ROOT / "client/memstream/sync"
ITERATOR = re.compile(r"^Async(?:Iterator|Generator)\[(.*?)(?:, None)?\]$", re.DOTALL)
HEAD = "Written by scripts/sync_sdk.py: change the asynchronous class, then run `make generate`."
RUFF = Path(sys.executable).with_name("ruff")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Wrapped:
    """A class with a blocking counterpart of the same name."""

    module: str
    name: str
    base: str = ""
    """Class of memstream.sync.bases."""
    attributes: tuple[tuple[str, str, str], ...] = ()
    """Name, type and docstring of instance attributes that become properties."""
    by_hand: tuple[str, ...] = ()
    """Methods that the base class has."""

    @property
    def is_iterator(self) -> bool:
        """Whether the base class has all of its methods."""
        return self.base.startswith(("Iterated", "Listed"))

    @property
    def source(self) -> type[Any]:
        """The asynchronous class."""
        found: type[Any] = getattr(importlib.import_module(self.module), self.name)
        return found


CURSOR = ("cursor", "Cursor | None", "The position from which a later watch continues; None before the first page.")
UNMATCHED = ("unmatched", "tuple[Unmatched, ...]", "What the memory lacks of the filter; empty before the first page.")
FILES: dict[str, tuple[Wrapped, ...]] = {
    "streams.py": (
        Wrapped("memstream.observe", "ObserveStream", "Opened"),
        Wrapped("memstream.recall", "RecallStream", "OpenedRecall"),
        Wrapped(
            "memstream.standing",
            "StandingQuery",
            "Iterated[AnswerChange]",
            (("answer", "Answer | None", "The whole current answer."),),
        ),
        Wrapped("memstream.watch", "Watch", "Iterated[Event]", (CURSOR,)),
    ),
    "memory.py": (
        Wrapped("memstream.memory", "Memory", "Handle"),
        Wrapped("memstream.fragment_listing", "FragmentListing", "Listed[Fragment]", (CURSOR, UNMATCHED)),
    ),
    "blocks.py": (
        Wrapped("memstream.blocks", "Blocks", "Handle"),
        Wrapped(
            "memstream.blocks",
            "BlockWatch",
            "Iterated[BlockChange]",
            (
                ("known", "dict[str, int]", "The version of each block returned so far, by name."),
                ("memory_uid", "str", "Whose versions they are; empty before the first answer."),
            ),
        ),
    ),
    "conversations.py": (
        Wrapped("memstream.conversations", "Conversation", "Handle"),
        Wrapped(
            "memstream.conversation_watch",
            "ConversationWatch",
            "Iterated[Message]",
            (("number", "int", "The number of the last message returned."),),
        ),
    ),
    "client.py": (Wrapped("memstream.client", "Client", "Connected", by_hand=("close", "import_")),),
}
COUNTERPARTS = {one.name: f"memstream.sync.{file[:-3]}" for file, found in FILES.items() for one in found}
COUNTERPARTS["Sent"] = COUNTERPARTS["Context"] = "memstream.sync.bases"
HANDLES = {one.name for found in FILES.values() for one in found if one.base == "Handle"}
"""Belong to no event loop."""
AGENT = ("memstream.agent", "AgentMemory", "agent.py")


class Imports:
    """The imports of a written file: where its names come from."""

    def __init__(self, own: Sequence[str]) -> None:
        self._own = set(own)
        self._found: set[tuple[str, str]] = set()

    def add_names(self, nodes: Iterator[ast.AST], module: str) -> None:
        """Add what the names in these nodes refer to in the asynchronous module."""
        known = dict(module_names(module))
        for name in {node.id for node in nodes if isinstance(node, ast.Name)}:
            if name in self._own:
                continue
            if name in COUNTERPARTS:
                self._found.add((COUNTERPARTS[name], name))
            elif name in known:
                self._found.add((known[name], name))

    def add(self, module: str, name: str) -> None:
        """Add one import."""
        self._found.add((module, name))

    def text(self) -> str:
        """The lines, for ruff to sort."""
        return "\n".join(f"from {module} import {name}" for module, name in sorted(self._found))


def module_names(module: str) -> Iterator[tuple[str, str]]:
    """(name, module to import it from) of what a module defines or imports."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((one.asname or one.name, node.module) for one in node.names)
        elif isinstance(node, ast.ClassDef | Function):
            yield node.name, module
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, module
        elif isinstance(node, ast.Assign):
            yield from ((target.id, module) for target in node.targets if isinstance(target, ast.Name))


def public_methods(one: Wrapped) -> Iterator[tuple[str, Function]]:
    """(module, definition) of the public methods of a class and of its bases in the SDK, in order."""
    seen = set(one.by_hand)
    for kind in one.source.__mro__:
        if not kind.__module__.startswith("memstream.") or kind.__name__ == "TwoWayStream":
            continue
        tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind)))
        definition = tree.body[0]
        assert isinstance(definition, ast.ClassDef)
        for node in definition.body:
            if isinstance(node, Function) and not node.name.startswith("_") and node.name not in seen:
                seen.add(node.name)
                yield kind.__module__, node


def write_class(one: Wrapped, imports: Imports) -> str:
    """The blocking class."""
    inner = f"{one.module}.{one.name}"
    lines = []
    if "@check_methods" in inspect.getsource(one.source).partition("class ")[0]:
        imports.add("memstream.arguments", "check_methods")
        lines.append("@check_methods")
    base = one.base.partition("[")[0]
    imports.add("memstream.sync.bases", base)
    imports.add_names(ast.walk(ast.parse(one.base)), one.module)
    lines += [
        f"class {one.name}({one.base}):",
        f'    """See memstream.{one.name}."""',
        f"    def __init__(self, inner: {inner}) -> None:",
        "        super().__init__(inner)",
        "        self._inner = inner",
    ]
    for name, kind, text in one.attributes:
        imports.add_names(ast.walk(ast.parse(kind)), one.module)
        lines += ["    @property", f"    def {name}(self) -> {kind}:", f'        """{text}"""']
        lines.append(f"        return self._inner.{name}")
    for module, method in () if one.is_iterator else public_methods(one):
        lines += write_method(method, imports, module)
    return "\n".join(lines)


def write_method(method: Function, imports: Imports, module: str) -> Iterator[str]:
    """The lines of the blocking method or property."""
    is_property = any(isinstance(each, ast.Name) and each.id == "property" for each in method.decorator_list)
    returns, expression = blocking_call(method, is_property)
    imports.add_names(ast.walk(ast.parse(returns)), module)
    imports.add_names(ast.walk(method.args), module)
    imports.add_names(ast.walk(ast.parse(expression)), module)
    if "Iterator[" in returns:
        imports.add("collections.abc", "Iterator")
    if "LOOP." in expression:
        imports.add("memstream.sync.loop", "LOOP")
    if is_property:
        yield "    @property"
    yield f"    def {method.name}({ast.unparse(method.args)}) -> {returns}:"
    text = (ast.get_docstring(method) or "").replace("async with", "with")
    yield (
        '        """'
        + text.replace("\n", "\n        ").replace("\n        \n", "\n\n")
        + ('\n        """' if "\n\n" in text else '"""')
    )
    yield f"        {'' if returns == 'None' else 'return '}{expression}"


def blocking_call(method: Function, is_property: bool) -> tuple[str, str]:
    """(type, expression) of the blocking method's result."""
    returns = ast.unparse(method.returns) if method.returns else "None"
    call = f"self._inner.{method.name}"
    if is_property:
        return returns, f"{returns}({call})" if returns in HANDLES else call
    call += f"({forward_arguments(method.args)})"
    if found := ITERATOR.match(returns):
        return f"Iterator[{found[1]}]", f"LOOP.iterate_from(lambda: {call})"
    if isinstance(method, ast.AsyncFunctionDef):
        return returns, f"{returns}(LOOP.run({call}))" if returns in COUNTERPARTS else f"LOOP.run({call})"
    if returns in HANDLES:
        return returns, f"{returns}({call})"
    return returns, f"{returns}(LOOP.make(lambda: {call}))" if returns in COUNTERPARTS else call


def forward_arguments(arguments: ast.arguments) -> str:
    """The arguments of the call of the asynchronous method."""
    passed = [one.arg for one in (*arguments.posonlyargs, *arguments.args) if one.arg != "self"]
    passed += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    passed += [f"{one.arg}={one.arg}" for one in arguments.kwonlyargs]
    passed += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return ", ".join(passed)


def write_file(title: str, body: str, imports: Imports, further: str = "") -> str:
    """The formatted text of a module."""
    text = f'"""{title}\n\n{HEAD}\n"""\n\n'
    text += f"from __future__ import annotations\n{further}\n{imports.text()}\n\n\n{body}\n"
    for command in (("check", "--select", "I", "--fix-only"), ("format",)):
        text = subprocess.run(
            [str(RUFF), *command, "--quiet", "--stdin-filename", str(SYNC / "x.py"), "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        ).stdout
    return text


def wrapper_file(file: str) -> str:
    """The text of a file of FILES."""
    found = FILES[file]
    imports = Imports([one.name for one in found])
    body = "\n\n\n".join(write_class(one, imports) for one in found)
    modules = "".join(f"import {module}\n" for module in sorted({one.module for one in found}))
    return write_file(f"The blocking {', '.join(one.name for one in found)}.", body, imports, modules)


def agent_file() -> str:
    """The text of the blocking AgentMemory: its code without `async` and `await`."""
    module, name, _ = AGENT
    source = re.sub(r"\basync def\b", "def", inspect.getsource(getattr(importlib.import_module(module), name)))
    source = re.sub(r"\bawait ", "", source)
    imports = Imports([name])
    imports.add_names(ast.walk(ast.parse(source)), module)
    return write_file(f"The blocking {module}.{name}.", source.rstrip(), imports)


def main() -> int:
    """The exit code: 1 if `--check` finds a file that differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    given = parser.parse_args()
    texts = {SYNC / file: wrapper_file(file) for file in FILES} | {SYNC / AGENT[2]: agent_file()}
    if not given.check:
        for path, text in texts.items():
            path.write_text(text, "utf-8")
        return 0
    stale = [path for path, text in texts.items() if path.read_text("utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is out of date: run `make generate`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
