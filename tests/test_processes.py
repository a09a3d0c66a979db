"""Child processes of a shell's background job, which ignores SIGINT, can be interrupted and end."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import COMMAND, environment
from tests.support import journals
from tests.support.processes import paused, run_process, stop_ignoring_interrupts

SLEEPER = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")
IGNORING = """\
import os, signal, sys
signal.signal(int(sys.argv[1]), signal.SIG_IGN)
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.fixture
def ignored() -> Iterator[None]:
    """Ignore SIGINT, as a background job does."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignored")
def test_children_do_not_inherit_ignored_signals() -> None:
    stop_ignoring_interrupts()
    signal.raise_signal(signal.SIGINT)  # does not end the test run
    with run_process(SLEEPER) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == -signal.SIGINT


def test_failing_test_kills_its_program() -> None:
    with pytest.raises(ZeroDivisionError), run_process(SLEEPER) as child:
        raise ZeroDivisionError
    assert child.returncode == -signal.SIGKILL


FORKING = """
import signal
from tests.support import forked
forked.IMPORTED.clear()
print(forked.ForkedProgram([], {}, "signal:pause").pid, flush=True)
signal.pause()
"""


def test_forked_programs_end_with_a_killed_run() -> None:
    with run_process((sys.executable, "-c", FORKING)) as run:
        assert run.stdout is not None
        forked = os.pidfd_open(int(run.stdout.readline()))
        run.kill()
        assert select.select([forked], [], [], 60)[0], "it still runs"
        os.close(forked)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_handles_signals_that_it_inherits_as_ignored(number: signal.Signals, tmp_path: Path) -> None:
    serve = [*COMMAND, "serve", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
    command = [sys.executable, "-c", IGNORING, str(int(number)), *serve]
    with run_process(command, env=environment() | journals.environment(serve[len(COMMAND) :])) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("memstream listens on ")
        server.send_signal(number)
        assert server.wait(120) == 0


BUSY = """
import threading, time
def work():
    while True:
        time.sleep(0)
for _ in range(20):
    threading.Thread(target=work).start()
print("up", flush=True)
"""


def test_every_thread_of_a_paused_process_has_stopped() -> None:
    with run_process((sys.executable, "-c", BUSY)) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        with paused(child.pid):
            tasks = list(Path(f"/proc/{child.pid}/task").iterdir())
            before = [(task / "schedstat").read_text() for task in tasks]
            assert len(tasks) > 20
            assert [(task / "schedstat").read_text() for task in tasks] == before
