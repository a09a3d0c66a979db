"""One real server for the whole package, in a separate process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server import ServerProcess


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The shared server; each test uses its own memories."""
    with ServerProcess(tmp_path_factory.mktemp("cli") / "data") as running:
        yield running
