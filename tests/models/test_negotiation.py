"""Which parts of a request an endpoint takes: found in a bounded number of requests, and not from an outage."""

from __future__ import annotations

import pytest

from memstream_server.adapters.models.endpoint import RequestPart, negotiate_parts
from memstream_server.adapters.models.resilience import StatusError

PARTS = [
    RequestPart("schema", ("json_schema",)),
    RequestPart("system", ("system role",)),
    RequestPart("temperature", ("temperature",)),
]
ALL = frozenset(part.name for part in PARTS)


class Scripted:
    """An endpoint that refuses some parts with a status, after the statuses of an outage."""

    def __init__(self, refuses: dict[str, int], outage: tuple[int, ...] = (), excerpt: str = "") -> None:
        self.refuses = refuses
        self.outage = list(outage)
        self.excerpt = excerpt
        self.sent: list[frozenset[str]] = []

    async def __call__(self, parts: frozenset[str]) -> str:
        self.sent.append(parts)
        if self.outage and (status := self.outage.pop(0)):
            raise StatusError(status, "url")
        for name, status in self.refuses.items():
            if name in parts:
                raise StatusError(status, "url", excerpt=self.excerpt)
        return "reply"


@pytest.mark.parametrize("status", [400, 404, 405, 415, 422, 500, 501])
@pytest.mark.parametrize("refused", [[], ["schema"], ["system"], ["temperature"], ["schema", "system"], sorted(ALL)])
async def test_finds_exactly_what_is_refused(status: int, refused: list[str]) -> None:
    endpoint = Scripted(dict.fromkeys(refused, status))
    assert await negotiate_parts(endpoint, PARTS) == (ALL - set(refused), "reply")
    assert len(endpoint.sent) <= 1 + 2 * len(PARTS)


async def test_all_parts_taken_cost_one_request() -> None:
    endpoint = Scripted({})
    await negotiate_parts(endpoint, PARTS)
    assert endpoint.sent == [ALL]


async def test_part_that_the_error_names_is_left_out_first() -> None:
    endpoint = Scripted({"temperature": 400}, excerpt="Unsupported value: 'Temperature' does not ...")
    assert (await negotiate_parts(endpoint, PARTS))[0] == {"schema", "system"}
    assert endpoint.sent == [ALL, {"schema", "system"}]


@pytest.mark.parametrize("outage", [(500,), (500, 500), (501, 500, 500)])
async def test_outage_takes_no_part_away(outage: tuple[int, ...]) -> None:
    endpoint = Scripted({}, outage)
    assert (await negotiate_parts(endpoint, PARTS))[0] == ALL


async def test_outage_in_front_of_refusal_takes_only_the_refused() -> None:
    endpoint = Scripted({"system": 400}, (500,))
    assert (await negotiate_parts(endpoint, PARTS))[0] == {"schema", "temperature"}


async def test_endpoint_that_refuses_everything_raises_its_first_error() -> None:
    endpoint = Scripted({}, (422, 400, 400, 400))
    with pytest.raises(StatusError) as raised:
        await negotiate_parts(endpoint, PARTS)
    assert raised.value.status == 422
    assert len(endpoint.sent) == 4


@pytest.mark.parametrize("status", [401, 403, 429, 502, 503, 504, 529])
async def test_other_statuses_decide_nothing(status: int) -> None:
    endpoint = Scripted({}, (status,))
    with pytest.raises(StatusError):
        await negotiate_parts(endpoint, PARTS)
    assert len(endpoint.sent) == 1
    later = Scripted({"schema": 400}, (0, status))  # in the middle of it
    with pytest.raises(StatusError) as raised:
        await negotiate_parts(later, PARTS)
    assert raised.value.status == status
