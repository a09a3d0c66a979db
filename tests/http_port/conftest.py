"""A server with an HTTP port."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.conftest import check_log
from tests.support.server import ServerProcess, free_address


@pytest.fixture(scope="module")
def http_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, str]]:
    """The server, and host:port of its HTTP port."""
    address = free_address()
    with ServerProcess(tmp_path_factory.mktemp("http") / "data", http_listen=address) as server:
        yield server, address
        assert server.stop() == 0
    check_log(server)
