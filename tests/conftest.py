"""Schemas that tests leave in a database are dropped; properties have no deadline; children can be interrupted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.journals import drop_schemas
from tests.support.processes import stop_ignoring_interrupts

stop_ignoring_interrupts()

# Two busy cores decide how long an example takes.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _no_schema_is_left() -> Iterator[None]:
    yield
    drop_schemas()
