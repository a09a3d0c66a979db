"""Set-up of every test run.

Schemas that tests leave in a database are dropped; properties have no deadline; children can be interrupted; a failed
run says how to repeat it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.journals import drop_schemas
from tests.support.processes import stop_ignoring_interrupts
from tests.support.seeds import rounds

FILES_OF_A_LONG_RUN = 50

stop_ignoring_interrupts()
# A server that has to compile the package takes 0.3 s of CPU longer to start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Two busy cores decide how long an example takes. A push fails for its own changes, not for an example that no earlier
# run had drawn: those are for `--hypothesis-profile exploring`.
untimed = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("exploring", untimed)
settings.register_profile("repeatable", untimed, derandomize=True, database=None, max_examples=rounds(100, 40))
settings.load_profile("repeatable")


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


@pytest.fixture(scope="session", autouse=True)
def _no_schema_is_left() -> Iterator[None]:
    yield
    drop_schemas()
