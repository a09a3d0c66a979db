"""What the tests leave behind in a database is taken away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.journals import drop_schemas


@pytest.fixture(scope="session", autouse=True)
def _no_schema_is_left() -> Iterator[None]:
    yield
    drop_schemas()
