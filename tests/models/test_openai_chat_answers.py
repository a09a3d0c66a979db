"""Importance and insights from an LLM: batches, answers to the letter, refusals, and prompts of one's own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from memstream_server.adapters.models import llm_questions
from memstream_server.adapters.models.llm_questions import ChatInsights, ChatScorer
from memstream_server.adapters.models.openai_chat import ChatModel, OpenAIChat
from memstream_server.adapters.models.prompts import PromptError, load_prompts
from memstream_server.adapters.models.resilience import MalformedError, Resilience
from memstream_server.ports.models import Account, ModelRefused, ModelUnavailable
from tests.support.fake_openai import JSON, FakeOpenAI, Fault

QUICK = Resilience(attempts=2, deadline_s=60, backoff_s=0.001, failures_to_open=1_000)
PROMPTS = load_prompts()


@asynccontextmanager
async def chatting() -> AsyncIterator[tuple[FakeOpenAI, ChatModel]]:
    async with FakeOpenAI() as fake:
        chat = ChatModel(OpenAIChat(model="m", base_url=fake.base_url, resilience=QUICK))
        try:
            yield fake, chat
        finally:
            await chat.close()


def shown(body: JSON) -> Any:
    return json.loads(body["messages"][1]["content"])


def rated(body: JSON) -> str:
    """Each text's score is its length, in falling order of their numbers."""
    scores = [{"number": one["number"], "score": min(10, len(one["text"]))} for one in shown(body)["texts"]]
    return json.dumps({"scores": scores[::-1]})


def asked(fake: FakeOpenAI) -> list[list[str]]:
    return [[one["text"] for one in shown(seen.body)["texts"]] for seen in fake.seen]


async def test_importance_is_a_tenth_of_the_score_in_order_and_batched() -> None:
    async with chatting() as (fake, chat):
        fake.complete = rated
        texts = ["a", "bb", "ccc", "dddd", "eeeee"]
        assert await ChatScorer(chat, PROMPTS.importance, batch_texts=2).score(texts) == [0.1, 0.2, 0.3, 0.4, 0.5]
        assert sorted(asked(fake)) == [["a", "bb"], ["ccc", "dddd"], ["eeeee"]]
        assert await ChatScorer(chat, PROMPTS.importance).score([]) == []


async def test_long_texts_are_clipped_in_bounded_batches() -> None:
    async with chatting() as (fake, chat):
        fake.complete = rated
        await ChatScorer(chat, PROMPTS.importance, batch_characters=4_000).score(["x" * 9_000] * 3)
        assert sorted(len(batch) for batch in asked(fake)) == [1, 2]
        assert {len(text) for batch in asked(fake) for text in batch} == {1_501}


async def test_repeat_of_failed_call_asks_only_the_rest() -> None:
    async with chatting() as (fake, chat):
        fake.complete = lambda body: "no" if "bb" in asked_texts(body) else rated(body)
        scorer = ChatScorer(chat, PROMPTS.importance, batch_texts=1)
        account = Account("ns", "memory")
        with pytest.raises(ModelUnavailable, match="malformed"):
            await scorer.score(["a", "bb", "ccc"], account)
        fake.complete, fake.seen = rated, []
        assert await scorer.score(["dddd"], account) == [0.4]  # another call of the memory takes nothing away
        assert await scorer.score(["a", "bb", "ccc"], Account("ns", "memory")) == [0.1, 0.2, 0.3]
        assert asked(fake) == [["dddd"], ["bb"]]
        assert not scorer._kept


@pytest.mark.parametrize("other", [Account("ns", "other"), Account("other", "memory 2"), Account("ns"), None])
async def test_scores_are_kept_for_one_memory_alone(other: Account | None) -> None:
    async with chatting() as (fake, chat):
        fake.complete = lambda body: "no" if "bb" in asked_texts(body) else rated(body)
        scorer = ChatScorer(chat, PROMPTS.importance, batch_texts=1)
        with pytest.raises(ModelUnavailable):
            await scorer.score(["a", "bb"], Account("ns", "memory"))
        fake.complete, fake.seen = rated, []
        assert await scorer.score(["a"], other) == [0.1]
        assert asked(fake) == [["a"]]


async def test_same_text_is_asked_again_after_success() -> None:
    async with chatting() as (fake, chat):
        fake.complete = rated
        scorer = ChatScorer(chat, PROMPTS.importance)
        first, second = Account("ns", "memory"), Account("ns", "memory")
        await scorer.score(["a"], first)
        await scorer.score(["a"], second)
        assert (first.requests, second.requests) == (1, 1)
        assert not scorer._kept


def asked_texts(body: JSON) -> list[str]:
    return [one["text"] for one in shown(body)["texts"]]


def declined(reply: JSON) -> None:
    reply["choices"][0]["message"]["refusal"] = "no"


@asynccontextmanager
async def refusing(refuses: Callable[[str], bool]) -> AsyncIterator[tuple[FakeOpenAI, ChatModel]]:
    """An endpoint whose model declines requests with such a text in them."""
    async with chatting() as (fake, chat):
        reply = fake._chat_reply

        def reply_or_decline(body: JSON) -> JSON:
            fake.complete = rated
            out = reply(body)
            if any(map(refuses, asked_texts(body))):
                declined(out)
            return out

        fake._chat_reply = reply_or_decline  # type: ignore[method-assign]  # a fault by content, not by turn
        yield fake, chat


async def test_refused_texts_are_isolated() -> None:
    async with refusing(lambda text: text.startswith("bad")) as (_, chat):
        texts = [f"bad {number}" if number in (3, 11) else f"good {number}" for number in range(16)]
        scorer = ChatScorer(chat, PROMPTS.importance, batch_texts=8)
        with pytest.raises(ModelRefused) as raised:
            await scorer.score(texts)
        assert raised.value.inputs == (3, 11)
        assert len(await scorer.score([text for text in texts if text.startswith("good")])) == 14


async def test_one_refused_text_alone_is_refused() -> None:
    async with refusing(lambda text: text == "bad") as (_, chat):
        with pytest.raises(ModelRefused) as raised:
            await ChatScorer(chat, PROMPTS.importance).score(["bad"])
        assert raised.value.inputs == (0,)


async def test_endpoint_refusing_all_refuses_no_text() -> None:
    async with refusing(lambda text: True) as (_, chat):
        with pytest.raises(ModelUnavailable, match="any text"):
            await ChatScorer(chat, PROMPTS.importance).score(["a", "b"])
        with pytest.raises(ModelUnavailable, match="any question"):
            await ChatInsights(chat, PROMPTS).promotion_insights(["a", "b"])


async def test_refused_insight_texts_are_refused_together() -> None:
    async with refusing(lambda text: text == "bad") as (_, chat):
        with pytest.raises(ModelRefused) as raised:
            await ChatInsights(chat, PROMPTS).promotion_insights(["good", "bad"])
        assert raised.value.inputs == (0, 1)


async def test_insights_on_promotion_and_none() -> None:
    async with chatting() as (fake, chat):
        insights = ChatInsights(chat, PROMPTS)
        fake.say('{"insights": [" Bob lives by tea. "]}', '{"insights": []}')
        assert await insights.promotion_insights(["Bob drinks tea", "Bob buys tea"]) == ["Bob lives by tea."]
        assert await insights.promotion_insights(["Bob drinks tea"]) == []
        assert await insights.promotion_insights([]) == []
        assert asked(fake) == [["Bob drinks tea", "Bob buys tea"], ["Bob drinks tea"]]


async def test_questions_use_latest_texts_up_to_count() -> None:
    async with chatting() as (fake, chat):
        fake.say('{"questions": ["Who?", "Why?", "When?"]}')
        insights = ChatInsights(chat, PROMPTS, characters=10)
        assert await insights.derive_questions(["oldest", "older", "newer"], 2) == ["Who?", "Why?"]
        assert asked(fake) == [["older", "newer"]]
        assert "the 2 most salient questions" in fake.seen[0].body["messages"][0]["content"].replace("\n", " ")
        assert await insights.derive_questions([], 2) == []


async def test_reflection_cites_places_of_its_texts() -> None:
    async with chatting() as (fake, chat):
        fake.say('{"insights": [{"insight": "Tea wins.", "evidence": [3, 1, 3]}, {"insight": "So.", "evidence": [2]}]}')
        insights = ChatInsights(chat, PROMPTS)
        assert await insights.reflect("Why tea?", ["a", "b", "c"], 1) == [("Tea wins.", (2, 0))]
        assert shown(fake.seen[0].body)["question"] == "Why tea?"


async def test_evidence_that_was_not_shown_cannot_be_cited() -> None:
    async with chatting() as (fake, chat):
        fake.complete = lambda body: '{"insights": [{"insight": "Tea wins.", "evidence": [2]}]}'
        with pytest.raises(ModelUnavailable, match="'evidence' must be a whole number of 1 to 1"):
            await ChatInsights(chat, PROMPTS, characters=5).reflect("Why?", ["shown", "left out"], 5)


async def test_throttled_scoring_waits_and_succeeds() -> None:
    async with chatting() as (fake, chat):
        fake.complete = rated
        fake.fail(Fault(status=429, headers={"retry-after-ms": "5"}))
        assert await ChatScorer(chat, PROMPTS.importance).score(["abc"]) == [0.3]


ONE = {"number": 1, "score": 5}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"scores": None},
        {"scores": [ONE]},
        {"scores": [ONE, ONE]},
        {"scores": [ONE, {"number": 2, "score": 5}, {"number": 3, "score": 5}]},
        {"scores": [ONE, 5]},
        {"scores": [ONE, {"number": 2}]},
        *({"scores": [ONE, {"number": 2, "score": score}]} for score in (0, 11, 5.5, "5", True, None, float("nan"))),
        *({"scores": [ONE, {"number": number, "score": 5}]} for number in (0, -1, 3, "2")),
    ],
)
def test_scores_are_of_every_text_once_and_of_the_scale(answer: Any) -> None:
    with pytest.raises(MalformedError):
        llm_questions.parse_scores(answer, 2)


def test_scores_in_any_order() -> None:
    assert llm_questions.parse_scores({"scores": [{"number": 2, "score": 10.0}, ONE]}, 2) == [0.5, 1.0]


@pytest.mark.parametrize("item", ["", "  ", 5, None, ["x"], {"insight": "x"}, "x" * 4_001])
def test_texts_are_sentences(item: Any) -> None:
    with pytest.raises(MalformedError):
        llm_questions.parse_texts({"insights": ["fine", item]}, "insights")


@pytest.mark.parametrize(
    "item", ["x", {"insight": "x"}, *({"insight": "x", "evidence": e} for e in ([], None, 1, [0], [4], ["1"], [True]))]
)
def test_reflection_cites_only_given_texts(item: Any) -> None:
    with pytest.raises(MalformedError):
        llm_questions.parse_cited({"insights": [item]}, 3)


def test_prompts_are_replaced_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "questions.txt").write_text("Ask $count things, at $$1 each.\n")
    own = load_prompts(tmp_path)
    assert own.questions.substitute(count=4) == "Ask 4 things, at $1 each."
    assert own.insight.template == PROMPTS.insight.template


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("questions.txt", "Ask $number things", "may use only \\$count"),
        ("importance.txt", "Rate $count texts", "no placeholder"),
        ("importance.txt", "It costs $5", "no placeholder"),
        ("importance.txt", "  \n", "must have text"),
        ("importance.txt", b"\xff\xfe\x00", "cannot be read"),
        ("importence.txt", "Rate", "has importence.txt; prompts are importance.txt"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named(tmp_path: Path, name: str, text: str | bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PromptError, match=complaint):
        load_prompts(tmp_path)


def test_a_directory_of_prompts_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no directory"):
        load_prompts(tmp_path / "none")
