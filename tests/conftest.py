"""Set-up of every test run.

Schemas that tests leave in a database are dropped; properties have no deadline; children can be interrupted; a failed
run says how to repeat it.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings

from tests.support.forked import end_forks
from tests.support.journals import DATABASE, drop_schemas
from tests.support.processes import stop_ignoring_interrupts
from tests.support.scans import list_unbounded
from tests.support.seeds import rounds
from tests.support.statement_recorder import list_recorded, record_test, watch_journals

FILES_OF_A_LONG_RUN = 50

stop_ignoring_interrupts()
watch_journals()
# A server that has to compile the package takes 0.3 s of CPU longer to start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Two busy cores decide how long an example takes. A push fails for its own changes, not for an example that no earlier
# run had drawn: those are for `--hypothesis-profile exploring`.
untimed = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("exploring", untimed)
settings.register_profile("repeatable", untimed, derandomize=True, database=None, max_examples=rounds(100, 40))
settings.load_profile("repeatable")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Write the bytecode of all tests before the workers of a whole run start.

    In a fresh clone each worker would take 12 s of CPU to rewrite the asserts, all at the same time.
    """
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if not is_whole or config.getoption("assertmode") != "rewrite" or sys.dont_write_bytecode:
        return
    state = config.stash[rewrite.assertstate_key]
    for source in Path(__file__).parent.rglob("test_*.py"):
        folder = rewrite.get_cache_dir(source)
        compiled = folder / f"{source.stem}{rewrite.PYC_TAIL}"
        if "toolchains" not in source.parts and rewrite._read_pyc(source, compiled) is None:
            folder.mkdir(parents=True, exist_ok=True)
            stamp, code = rewrite._rewrite_test(source, config)
            rewrite._write_pyc(state, code, stamp, compiled)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark properties as drawn, before marks select the tests of a run."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item.function, "hypothesis"):
            item.add_marker("drawn")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the slowest files of a long run, and the seed of a failed one: pytest's header is missing with -q."""
    by_file: Counter[str] = Counter()
    for report in (each for found in terminalreporter.stats.values() for each in found):
        if isinstance(report, pytest.TestReport):
            by_file[report.location[0]] += report.duration
    if len(by_file) >= FILES_OF_A_LONG_RUN:
        terminalreporter.section("slowest files, seconds")
        for file, duration_s in by_file.most_common(10):
            terminalreporter.write_line(f"{duration_s:8.1f} {file}")
    seed = config.getoption("randomly_seed", None)
    if seed is not None and {"failed", "error"} & terminalreporter.stats.keys():
        terminalreporter.write_line(f"Repeat the order and the random numbers of this run: --randomly-seed={seed}")


@pytest.fixture(scope="session", autouse=True)
def _state_is_in_a_folder_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`memstream observe` records what it sent in the user's state folder."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


def pytest_sessionfinish() -> None:
    """Count the CPU of the servers that this process forked."""
    end_forks()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Record the SQL of the tests of stores and of the engine."""
    record_test(item.path)


@pytest.fixture(scope="session", autouse=True)
def _no_statement_scans_a_table() -> Iterator[None]:
    """In every process of a run; an error of its last test names the statement."""
    yield
    assert DATABASE or list_unbounded(list_recorded(), are_all=False) == []


@pytest.fixture(scope="session", autouse=True)
def _no_schema_is_left() -> Iterator[None]:
    yield
    drop_schemas()
