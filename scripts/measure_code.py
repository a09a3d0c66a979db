"""Print the size and naming figures of Python trees as table rows: `python -m scripts.measure_code [PATH...]`.

Without a path: one row each for server, client, tests and benchmarks. The lines of a function count its code without
docstring, comments and blank lines. A participle is a one-word name such as `stored` or `sent`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREES = ("server/memstream_server", "client/memstream", "tests", "benchmarks")
IMPORT_ROOTS = {"memstream_server": ROOT / "server", "memstream": ROOT / "client"}
CAPPED_TREES = ("server/memstream_server", "client/memstream")
FILE_LINES_WARNED = 800
"""A longer file is named and passes: one idea may need it."""
FUNCTION_LINES_MAX = 70
"""With docstring and comments; ruff caps statements, branches and complexity."""
PARTICIPLE = re.compile(r"[a-z]+(?:ed|ing|wn|ld|pt|nt)")
HEAD = (
    "| tree | files | file lines, median/p90/max | function lines, median/p90/max | comments | one-word functions "
    "| participles | test names, median/p90/max |"
)


@dataclass
class Figures:
    """The counts of one tree."""

    files: list[int] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    comment_lines: int = 0

    def add_file(self, path: Path) -> None:
        """Count one Python file."""
        text = path.read_text("utf-8")
        self.files.append(text.count("\n"))
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        self.comment_lines += sum(token.type == tokenize.COMMENT for token in tokens)
        code = {token.start[0] for token in tokens if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER)}
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            self.functions.append(len(code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))))
            if node.name.startswith("test_"):
                self.tests.append(node.name.removeprefix("test_"))
            elif not node.name.startswith("__"):
                self.names.append(node.name.strip("_"))

    def row(self, name: str) -> str:
        """The table row."""
        one_word = sum("_" not in one for one in self.names)
        participles = sum(bool(PARTICIPLE.fullmatch(one)) for one in self.names)
        return (
            f"| {name} | {len(self.files)} | {format_spread(self.files)} | {format_spread(self.functions)} "
            f"| {format_share(self.comment_lines, sum(self.files))} | {format_share(one_word, len(self.names))} "
            f"| {format_share(participles, len(self.names))} | {format_spread([len(test) for test in self.tests])} |"
        )


def format_spread(values: Sequence[int]) -> str:
    """median/p90/max, or `-` for none."""
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]}/{ordered[len(ordered) * 9 // 10]}/{ordered[-1]}"


def format_share(part: int, whole: int) -> str:
    """A percentage with one decimal below 10."""
    percent = 100 * part / max(1, whole)
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.1f} %"


def python_files(path: Path) -> list[Path]:
    """The Python files that git tracks below `path`, without generated code."""
    listed = subprocess.run(
        ["git", "ls-files", "--", str(path)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    return [ROOT / name for name in listed if name.endswith(".py") and "_pb2" not in name and (ROOT / name).exists()]


def module_imports() -> dict[str, set[str]]:
    """The imports among the modules of server and client, including imports for type checkers."""
    paths: dict[str, Path] = {}
    for package, base in IMPORT_ROOTS.items():
        for path in python_files(base / package):
            parts = path.relative_to(base).with_suffix("").parts
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: set(_imported_modules(name, path, paths)) for name, path in paths.items()}


def _imported_modules(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        found: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            found = [full if (full := f"{node.module}.{one.name}") in known else node.module for one in node.names]
        elif isinstance(node, ast.Import):
            found = [one.name for one in node.names]
        yield from (one for one in found if one in known and one != name)


def import_circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, largest first (reachability; a few hundred modules)."""
    reach: dict[str, set[str]] = {}
    for name in imports:
        seen: set[str] = set()
        ahead = [name]
        while ahead:
            for one in imports.get(ahead.pop(), ()):
                if one not in seen:
                    seen.add(one)
                    ahead.append(one)
        reach[name] = seen
    circles = {tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in imports if a in reach[a]}
    return sorted((list(circle) for circle in circles), key=len, reverse=True)


def single_importer_modules(imports: dict[str, set[str]]) -> list[str]:
    """Modules of the server outside cli/ that exactly one other module imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, found in imports.items():
        for one in found:
            importers[one].add(name)
    return sorted(
        name
        for name in imports
        if name.startswith("memstream_server.") and ".cli" not in name and len(importers[name]) == 1
    )


def print_circles(imports: dict[str, set[str]]) -> bool:
    """Whether there are import circles; prints them."""
    circles = import_circles(imports)
    print(f"import circles: {len(circles)}")
    for circle in circles:
        print(f"  {len(circle)}: {', '.join(circle)}")
    return bool(circles)


def functions_too_long() -> Iterator[str]:
    """Descriptions of the functions of server and client that exceed the cap; prints the names of long files."""
    for path in (file for tree in CAPPED_TREES for file in python_files(ROOT / tree)):
        text, name = path.read_text("utf-8"), path.relative_to(ROOT)
        if (lines := text.count("\n")) > FILE_LINES_WARNED:
            print(f"warning: {name} has {lines} lines, more than {FILE_LINES_WARNED}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    yield f"{name}: {node.name} has {lines} lines, at most {FUNCTION_LINES_MAX} are allowed"


def print_too_long() -> bool:
    """Whether a function is too long; prints them."""
    found = list(functions_too_long())
    print(f"functions that are too long: {len(found)}")
    for each in found:
        print(f"  {each}")
    return bool(found)


def main() -> None:
    """Print the rows, then circles and single importers of server and client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="trees to measure, relative to the repository")
    parser.add_argument(
        "--circles", action="store_true", help="only look for import circles; exit code 1 if there are any"
    )
    parser.add_argument("--caps", action="store_true", help="only look for too long functions; exit code 1")
    given = parser.parse_args()
    if given.caps:
        sys.exit(print_too_long())
    if given.circles:
        sys.exit(print_circles(module_imports()))
    paths = given.paths or TREES
    print(HEAD)
    print("|" + "---|" * (HEAD.count("|") - 1))
    for path in paths:
        figures = Figures()
        for file in python_files(ROOT / path):
            figures.add_file(file)
        print(figures.row(path))
    imports = module_imports()
    print()
    print_circles(imports)
    print(f"modules of the server with a single importer: {len(single_importer_modules(imports))}")


if __name__ == "__main__":
    main()
