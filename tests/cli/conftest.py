"""One real server for the whole package, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server import ServerProcess


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """For all tests here; each takes memories of its own."""
    with ServerProcess(tmp_path_factory.mktemp("cli") / "data") as running:
        yield running
