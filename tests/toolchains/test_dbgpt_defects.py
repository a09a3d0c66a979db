"""Defects of DB-GPT's memories that this server does not copy: each is reproduced there and tested here.

with_dbgpt/defects.py reproduces them with DB-GPT's classes; docs/dbgpt.md lists them. The tests of this server run
without DB-GPT elsewhere; here they run together with the defect from which they differ.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memstream
from memstream_server.core import tiers
from memstream_server.core.policy import DBGPT
from memstream_server.core.values import Enhancement, Fragment, Held, MemoryKind, State
from tests.core import test_dbgpt_defects as core
from tests.server import test_dbgpt_defects as server
from tests.server import test_llm as models
from tests.server.conftest import MakeServer, client, make_server, path, shared
from tests.server.test_llm import Llm, fake, llm
from tests.support.fake_openai import FakeOpenAI
from tests.toolchains import dbgpt

__all__ = ["client", "fake", "llm", "make_server", "path", "shared"]  # fixtures

pytestmark = pytest.mark.toolchain

SCRIPT = Path(__file__).with_name("with_dbgpt") / "defects.py"


def weakening_is_by_id() -> None:
    """A dropped fragment takes back its own enhancement, not that of another fragment with the same words."""
    anchor = Held(Fragment(id="1", content="anchor", importance=0.9, enhancement_count=2), None)
    first, second = (
        Held(Fragment(id="2", content="same", importance=0.1)),
        Held(Fragment(id="3", content="same", importance=0.5)),
    )
    given = (Enhancement("2", "same"), Enhancement("3", "same"))
    state = State(MemoryKind.HYBRID, b"", short_term=(Held(anchor.fragment, None, given), first, second))
    policy = core.policy(DBGPT, short_term__capacity=2, short_term__enhance_threshold=100)
    left = tiers.settle_held(state, policy, 0.0).state.short_term
    assert [(each.fragment.id, each.fragment.enhancement_count) for each in left] == [("1", 1), ("3", 0)]


DEFECTS: dict[str, tuple[object, Callable[..., Any]]] = {
    "fifo_overflow": (["2", "3", "4"], core.test_fifo_overflow_promotes_the_oldest_and_nothing_twice),
    "shared_metadata": ({"importance": 0.9}, server.test_metadata_belongs_to_each_fragment),
    "frozen_now": (["2020-05-08T00:00:00"], server.test_now_is_not_the_time_the_memory_was_made),
    "access_times_lost": (True, server.test_access_times_are_kept_also_over_a_restart),
    "weights_ignored": (True, server.test_the_weights_of_a_query_count),
    "unparsable_score_deletes": (
        [[], None],
        models.test_malformed_ratings_store_default_or_wait_in_dbgpt,
    ),
    "model_inside_the_lock": (True, server.test_model_call_blocks_no_read_and_no_other_memory),
    "reading_feeds_copies_back": (["[0] tea", "[1] rain;[0] tea;[0] tea"], server.test_reading_feeds_no_copies_back),
    "empty_insights_crash": ("list index out of range", core.test_no_insight_is_an_answer),
    "clear_keeps": ([[], ["tea"]], server.test_clear_empties_and_deleting_deletes),
    "nothing_reflects": ([True, False, 4], core.test_reflection_comes_due),
    "same_words_are_one": (0, weakening_is_by_id),
}
"""By name: DB-GPT's result, and the test of the right result."""


@pytest.fixture(scope="module")
def shown(dbgpt_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return dbgpt.ask(SCRIPT, home=tmp_path_factory.mktemp("dbgpt"))


@pytest.mark.parametrize("name", DEFECTS)
async def test_a_dbgpt_defect_does_not_occur_here(
    name: str,
    shown: dict[str, object],
    client: memstream.Client,
    path: str,
    make_server: MakeServer,
    fake: FakeOpenAI,
    llm: Llm,
) -> None:
    theirs, right = DEFECTS[name]
    assert shown[name] == theirs
    fixtures = {"client": client, "path": path, "make_server": make_server, "fake": fake, "llm": llm}
    done = right(**{given: fixtures[given] for given in inspect.signature(right).parameters})
    if inspect.isawaitable(done):
        await done


def test_the_page_lists_every_defect() -> None:
    page = (dbgpt.ROOT / "docs" / "dbgpt.md").read_text("utf-8")
    assert re.findall(r"^\| `([a-z_]+)` \|", page, re.M) == list(DEFECTS)
