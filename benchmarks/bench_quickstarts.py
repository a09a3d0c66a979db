"""Two-minute quickstarts: seconds from `pip install` of the built wheel to the remembered answer.

    python benchmarks/bench_quickstarts.py [NAME...] [--json FILE] [--cached]

Each quickstart has a new virtual environment and a new home, which are not timed; nor is what a person has already, as
the host's own program. Timed: `pip install` of the wheel with the extras of the page, from the package index without
pip's cache (with --cached: with it), then what the page says, until the fact of one session is in the answer of another
one. Replies come from a scripted endpoint, so the time of a person's model and reading are not in the figure. CPU is of
the processes that have ended; on a busy machine it says more than the seconds.

A quickstart is a function of the dictionary QUICKSTARTS: it gets a Start, and raises if the answer does not have the
fact. Add one by adding it there; one whose programs are missing raises Absent and is skipped with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from report import describe_machine, format_machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from quickstarts import FRAMEWORK_QUICKSTARTS  # noqa: E402

from tests.support.host_model import Asked, Called, HostModel, Reply  # noqa: E402
from tests.toolchains.hosts import PACKAGES, Host, prepared, version_of  # noqa: E402
from tests.toolchains.programs import CACHE, Absent  # noqa: E402

FACT, QUESTION = "We deploy on Tuesdays.", "On which day do we deploy?"
AIM_S = 120


@dataclass(frozen=True)
class Start:
    """What a quickstart begins with: an empty environment, an empty home, and the wheel."""

    home: Path
    wheel: Path
    cached: bool
    steps: dict[str, float]
    """Seconds of each step, in order."""

    @property
    def bin(self) -> Path:
        """The programs of the environment."""
        return self.home / "venv" / "bin"

    def install(self, extras: str = "", *others: str, environment: str = "venv") -> None:
        """`pip install` of the wheel with its extras, and other packages. Raises CalledProcessError."""
        python = self.home / environment / "bin" / "python"
        if not python.exists():
            venv.create(self.home / environment, with_pip=True)
        wanted = f"{self.wheel}[{extras}]" if extras else str(self.wheel)
        cache = ["--cache-dir", str(CACHE / "pip")] if self.cached else ["--no-cache-dir"]
        words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", *cache, wanted, *others]
        self.timed("pip install", lambda: self.run(python, *words))

    def run(self, *command: str | Path, stdin: str = "", **variables: str) -> str:
        """Runs a program in the home; returns its output. Raises CalledProcessError."""
        done = subprocess.run(
            [str(word) for word in command],
            input=stdin,
            env=self.variables() | variables,
            cwd=self.home,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout

    def variables(self) -> dict[str, str]:
        """The environment of a person's shell, in which the environment is active."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEMSTREAM_", "PYTHON"))}
        return kept | {"HOME": str(self.home), "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}

    def timed(self, step: str, work: Callable[[], object]) -> None:
        """Does a step and adds its seconds."""
        began = time.perf_counter()
        work()
        self.steps[step] = self.steps.get(step, 0) + time.perf_counter() - began


def start_host(name: str) -> Callable[[Start], None]:
    """The quickstart of docs/connect.md with a host that runs here."""

    def quickstart(start: Start) -> None:
        with prepared(name, start.home, start.bin / "memstream") as host:
            start.install("mcp,server")
            asyncio.run(_talk(start, host))

    return quickstart


async def _talk(start: Start, host: Host) -> None:
    def answer(asked: Asked) -> Reply:
        """As a model does: with a tool if it has one yet, else from what the hooks have put into the prompt."""
        tool, given = ("recall", {"query": QUESTION}) if QUESTION in asked.fresh else ("observe", {"content": FACT})
        if not asked.results and any(one.endswith(tool) for one in asked.tools):
            return [Called(tool, given)]
        if tool == "observe":
            return "Noted"
        return FACT if FACT in asked.text else "I do not know."

    async with HostModel(answer) as model:
        host.use_model(model.address)
        start.timed("memstream connect", host.connect)
        for step, prompt in (("first session", FACT), ("second session", QUESTION)):
            began = time.perf_counter()
            said = await host.turn(prompt, model.address)
            start.steps[step] = time.perf_counter() - began
        assert FACT in said, said


QUICKSTARTS: dict[str, Callable[[Start], None]] = {
    **{name: start_host(name) for name in PACKAGES},
    **FRAMEWORK_QUICKSTARTS,
}


def build_wheel(folder: Path) -> Path:
    """The wheel of this tree."""
    words = ["-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, *words, "--wheel-dir", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def measure(name: str, wheel: Path, *, cached: bool) -> tuple[dict[str, float], float]:
    """(seconds of each step, CPU seconds) of a quickstart. Raises Absent."""
    home = Path(tempfile.mkdtemp(prefix="quickstart-", dir="/var/tmp"))
    try:
        venv.create(home / "venv", with_pip=True)
        start, before = Start(home, wheel, cached, {}), _cpu_s()
        QUICKSTARTS[name](start)
        return start.steps, _cpu_s() - before
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measures the quickstarts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(QUICKSTARTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds of each step to FILE")
    parser.add_argument("--cached", action="store_true", help="let pip use its cache")
    given = parser.parse_args()
    if unknown := set(given.names) - QUICKSTARTS.keys():
        parser.error(f"no quickstart {', '.join(sorted(unknown))}")
    machine, found, failed = describe_machine(), dict[str, tuple[dict[str, float], float]](), 0
    print(format_machine(machine))
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder))
        for name in given.names or QUICKSTARTS:
            try:
                found[name] = measure(name, wheel, cached=given.cached)
            except Absent as reason:
                print(f"{name}: skipped, {reason}")
                continue
            except (AssertionError, OSError, subprocess.CalledProcessError, TimeoutError) as error:
                failed += 1
                print(f"{name}: failed, {error}")
                continue
            steps, cpu_s = found[name]
            total = sum(steps.values())
            each = ", ".join(f"{step} {seconds:.1f}" for step, seconds in steps.items())
            version = f" {version_of(name)}" if name in PACKAGES else ""
            within = "within" if total <= AIM_S else "NOT within"
            print(f"{name}{version}: {total:.0f} s, {within} {AIM_S} s ({each}); CPU {cpu_s:.0f} s", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"machine": machine, "seconds": found}, indent=1), "utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
