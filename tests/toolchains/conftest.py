"""Third-party servers, started once per session; tests skip with the reason if a server is not available."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from xdist.workermanage import WorkerController

from tests.server.conftest import check_log
from tests.toolchains import dbgpt
from tests.toolchains.fleet import Fleet
from tests.toolchains.milvus import MilvusServer
from tests.toolchains.postgres import Cluster
from tests.toolchains.programs import Absent

SUITE = "test_suite_on_postgres.py"


FOLDER = Path(__file__).parent
INSTALLED_IN_PLACE = {
    "clients": ("test_browsers.py", "test_clients.py", "test_story.py"),
    "deployment": ("test_chart.py", "test_chart_servers.py", "test_chart_values.py", "test_deploy.py", "test_mesh.py"),
}
"""Files whose tests build the same programs: one process runs them, so that none replaces what another one uses."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here needs a toolchain: `make test` does not even import this folder.

    Servers of these tests write the vector index at once; two processes share the tests by what they start.
    """
    groups = {file: group for group, files in INSTALLED_IN_PLACE.items() for file in files}
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.toolchain)
            item.add_marker(pytest.mark.with_index)
            used = {"fleet", "plain_fleet", "milvus", "postgres"}.intersection(getattr(item, "fixturenames", ()))
            alone = item.path.name if item.path.parent == FOLDER else item.path.parent.name
            servers = "servers" if used and item.path.name != SUITE else alone
            item.add_marker(pytest.mark.xdist_group(groups.get(item.path.name, servers)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: WorkerController, ids: list[str]) -> None:
    """Ends a run whose groups two processes would share: pytest-xdist passes a group at the end of the test's id."""
    here = [one for one in ids if one.startswith("tests/toolchains/")]
    lost = [one for one in here if "@" not in one.rpartition("]")[2]]
    if lost and node.config.getoption("dist") == "loadgroup":
        pytest.exit(f"pytest-xdist lost the groups of {len(lost)} tests, such as {lost[0]}", returncode=1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """A PostgreSQL cluster."""
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install '.[postgres]')")
    try:
        cluster = Cluster()
    except Absent as absent:
        pytest.skip(str(absent))
    try:
        cluster.start()
        yield cluster
    except Absent as absent:
        pytest.skip(str(absent))
    finally:
        cluster.remove()


@pytest.fixture(scope="session")
def milvus() -> Iterator[MilvusServer]:
    """A Milvus server."""
    try:
        server = MilvusServer()
    except Absent as absent:
        pytest.skip(str(absent))
    try:
        server.wait()
        yield server
    except Absent as absent:
        pytest.skip(str(absent))
    finally:
        server.remove()


@pytest.fixture(scope="session")
def dbgpt_python() -> Path:
    """The interpreter of DB-GPT's environment."""
    try:
        return dbgpt.python()
    except Absent as absent:
        pytest.skip(str(absent))


@pytest.fixture
def fleet(tmp_path: Path, postgres: Cluster, milvus: MilvusServer) -> Iterator[Fleet]:
    with _ended(Fleet(tmp_path, postgres, milvus)) as servers:
        yield servers


@pytest.fixture
def plain_fleet(tmp_path: Path, postgres: Cluster) -> Iterator[Fleet]:
    """Servers on PostgreSQL alone."""
    with _ended(Fleet(tmp_path, postgres, None)) as servers:
        yield servers


@contextmanager
def _ended(servers: Fleet) -> Iterator[Fleet]:
    yield servers
    for server in servers.made:
        server.kill()
    for server in servers.made:
        check_log(server)
