"""What the tests leave behind in a database is taken away; properties are tried without a clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.journals import drop_schemas

# Two busy cores decide how long an example takes.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _no_schema_is_left() -> Iterator[None]:
    yield
    drop_schemas()
