"""Run the tests nearest to a change: `python -m scripts.quick_tests [BASE]`, within a minute.

Nearest are the changed tests, then the tests that import a changed module. BASE is the commit to compare with (HEAD:
uncommitted changes). Tests that start a server come last, and what does not fit into the time is named.
"""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import time
from pathlib import Path

from scripts.measure_code import ROOT, python_files

SECONDS_MAX = 55.0
SLOW = ("tests/server", "tests/cli", "tests/access", "tests/benchmarks", "tests/conformance")


def changed_files(base: str) -> set[Path]:
    """Changed and new Python files, relative to the repository."""
    listed = [
        ["git", "diff", "--name-only", base],
        ["git", "ls-files", "--others", "--exclude-standard"],
    ]
    names: set[str] = set()
    for command in listed:
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
        names |= set(ran.stdout.splitlines())
    return {Path(name) for name in names if name.endswith(".py") and (ROOT / name).exists()}


def module_name(path: Path) -> str:
    """The dotted name that a test imports the file by."""
    parts = path.with_suffix("").parts
    return ".".join(parts[1:] if parts[0] in ("server", "client") else parts)


def imported_names(path: Path) -> set[str]:
    """Modules that a file imports, and the names that it imports from them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
    return found


def nearest_tests(changed: set[Path]) -> list[Path]:
    """Test files to run, the nearest and quickest first; toolchain tests are left out."""
    modules = {module_name(path) for path in changed}
    tests = [
        path.relative_to(ROOT)
        for path in python_files(ROOT / "tests")
        if path.name.startswith("test_") and "toolchains" not in path.parts
    ]
    nearest = [path for path in tests if path in changed or imported_names(ROOT / path) & modules]
    return sorted(nearest, key=lambda path: (path not in changed, str(path).startswith(SLOW), str(path)))


def run_until(command: list[str], seconds: float) -> int | None:
    """The exit code; None where time ran out. An interrupted pytest ends the processes that its tests started."""
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait(30)
            return None


def main() -> int:
    """Lint the changed files, then run tests file by file until the time is over."""
    changed = changed_files(sys.argv[1] if len(sys.argv) > 1 else "HEAD")
    if not changed:
        print("quick: no Python file has changed; `make quick BASE=main` compares with main")
        return 0
    started_s = time.monotonic()
    names = sorted(map(str, changed))
    if subprocess.run([sys.executable, "-m", "ruff", "check", *names], cwd=ROOT, check=False, timeout=60).returncode:
        return 1
    tests = nearest_tests(changed)
    for number, path in enumerate(tests):
        left_s = SECONDS_MAX - (time.monotonic() - started_s)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", str(path)]
        code = run_until(command, max(1.0, left_s))
        if code is None:
            print(f"quick: no time left for {' '.join(map(str, tests[number:]))}")
            break
        if code not in (0, 5):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
