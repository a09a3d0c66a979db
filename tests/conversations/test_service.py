"""Messages and plans end to end: the SDK against a server process."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memstream
import memstream.sync
from memstream import Capability, Conversation, ConversationNotFound, InvalidRequest, NewMessage, Plan, PlanState
from memstream.status import translate_error
from memstream.v1 import conversation_service_pb2 as pb
from tests.support.seeds import rounds
from tests.support.server import ServerProcess

SAID: memstream.MessageFields = {
    "receiver": "user",
    "role": "assistant",
    "rounds": 2,
    "success": False,
    "app_code": "code",
    "app_name": "name",
    "current_goal": "make bob laugh",
    "context": json.dumps({"lang": "en"}),
    "review_info": "{}",
    "action_report": "[1]",
    "model_name": "scripted",
    "resource_info": "null",
}

RPCS = [method.name for method in pb.DESCRIPTOR.services_by_name["ConversationService"].methods]


def _near_a_request(rest: bytes) -> bytes:
    """Bytes that start like most requests: namespace and conversation."""
    return b"\x0a\x04fuzz\x12\x01c" + rest


async def numbers(listing: Any) -> list[int]:
    return [item.number async for item in listing]


async def test_server_announces_conversations(client: memstream.Client) -> None:
    assert Capability.CONVERSATIONS in (await client.server_info()).capabilities


async def test_message_round_trips(talk: Conversation) -> None:
    message = await talk.append("joy", "Why don't scientists trust atoms?", **SAID)
    assert (message.number, message.sender, message.content) == (1, "joy", "Why don't scientists trust atoms?")
    assert {name: getattr(message, name) for name in SAID} == SAID
    assert message.create_time == message.update_time is not None
    assert await talk.last_message() == message
    assert [each async for each in talk.messages()] == [message]
    assert (await talk.append("user", "")).success is None


async def test_messages_are_listed_by_agents_and_goal_in_pages(talk: Conversation) -> None:
    for place in range(7):
        await talk.append("user" if place % 2 else "joy", "x", receiver="joy" if place % 2 else "user")
    await talk.append("joy", "x", receiver="critic", current_goal="review")
    assert await numbers(talk.messages(page_size=3)) == list(range(1, 9))
    assert await numbers(talk.messages("critic")) == [8]
    assert await numbers(talk.messages("joy", "user", page_size=2)) == list(range(1, 8))
    assert await numbers(talk.messages(current_goal="review")) == [8]


async def test_page_is_cut_by_bytes_without_loss(client: memstream.Client, talk: Conversation) -> None:
    for _ in range(12):
        await talk.append_messages([NewMessage(role="user", body=json.dumps("y" * 100_000))] * 2)
    request = pb.ListMessagesRequest(namespace=talk.namespace, conversation=talk.name, page_size=1_000)
    answer = await client._link.call(client._link.conversations.ListMessages, request)
    assert 1 < len(answer.messages) < 24
    assert await numbers(talk.messages(page_size=1_000)) == list(range(1, 25))


async def test_plans_change_state(talk: Conversation) -> None:
    saved = await talk.save_plans(
        [Plan(number=1, title="think", agent="joy", rely=""), Plan(number=2, title="tell", rely="1", max_retry_times=3)]
    )
    assert [plan.state for plan in saved] == [PlanState.TODO, PlanState.TODO]
    await talk.update_plan(1, state=PlanState.RUNNING)
    failed = await talk.update_plan(2, state=PlanState.RETRYING, retry_times=1, agent="critic", agent_model="m")
    assert (failed.title, failed.retry_times, failed.max_retry_times, failed.agent) == ("tell", 1, 3, "critic")
    assert await numbers(talk.plans(to_do=True)) == [2]
    done = await talk.complete_plan(1, "a joke")
    assert (done.state, done.result) == (PlanState.COMPLETE, "a joke")
    kept = await talk.update_plan(2, result="so far")
    assert (kept.state, kept.retry_times, kept.result) == (PlanState.RETRYING, 1, "so far")
    assert await numbers(talk.plans([2, 9])) == [2]
    assert await numbers(talk.plans(page_size=1)) == [1, 2]
    (replaced,) = await talk.save_plans([Plan(number=2, title="again")])
    assert [plan async for plan in talk.plans([2])] == [replaced]
    assert await talk.remove_plans() == 2
    assert await numbers(talk.plans()) == []


async def test_not_found_names_the_resource(talk: Conversation) -> None:
    for work in (
        numbers(talk.messages()),
        talk.last_message(),
        talk.delete_messages(),
        numbers(talk.plans()),
        talk.update_plan(1, result="x"),
        talk.complete_plan(1),
        talk.remove_plans(),
    ):
        with pytest.raises(ConversationNotFound) as caught:
            await work
        assert (caught.value.reason, caught.value.details) == ("CONVERSATION_NOT_FOUND", {"conversation": "monday"})
    await talk.save_plans([Plan(number=1)])
    assert await numbers(talk.messages()) == []
    with pytest.raises(ConversationNotFound):
        await talk.complete_plan(2)


async def test_deleting_does_not_reuse_numbers(talk: Conversation) -> None:
    for _ in range(3):
        await talk.append("joy", "x")
    assert await talk.delete_messages() == 3
    assert await numbers(talk.messages()) == []
    assert (await talk.append("joy", "x")).number == 4


async def test_watch_ends_with_conversation(talk: Conversation) -> None:
    await talk.append("joy", "one")
    async with talk.watch() as watch:
        assert (await anext(watch)).content == "one"
        await talk.append("joy", "two")
        assert (await anext(watch)).content == "two"
        await talk.complete()
        assert [message async for message in watch] == []
    assert await numbers(talk.watch()) == [1, 2]
    assert await numbers(talk.watch(1)) == [2]
    assert await numbers(talk.watch(2)) == []


async def test_watch_waits_for_first_message(talk: Conversation) -> None:
    async with talk.watch() as watch:
        waiting = asyncio.create_task(numbers(watch))
        await asyncio.sleep(0)
        await talk.complete()
        assert await waiting == []


async def test_closed_watch_drops_prefetched_messages(talk: Conversation) -> None:
    for text in ("one", "two"):
        await talk.append("joy", text)
    await talk.complete()
    async with talk.watch() as watch:
        assert (await anext(watch)).number == 1
    with pytest.raises(memstream.StreamClosed):
        await anext(watch)  # nor was this the end
    assert watch.number == 1


async def test_message_reopens_completed_conversation(talk: Conversation) -> None:
    await talk.append("joy", "one")
    watch = talk.watch()
    assert (await anext(watch)).number == 1
    await talk.complete()
    await talk.append("joy", "two")
    assert [message.number async for message in watch] == []  # it saw the end, although the conversation was reopened
    async with talk.watch(1) as going_on:
        assert (await anext(going_on)).content == "two"


async def test_watch_reads_several_pages_in_order(talk: Conversation) -> None:
    for _ in range(6):
        await talk.append_messages([NewMessage(role="user", content="x")] * 100)
    await talk.complete()
    assert await numbers(talk.watch()) == list(range(1, 601))


async def test_idle_watch_sends_marks(client: memstream.Client, talk: Conversation) -> None:
    request = pb.WatchMessagesRequest(namespace=talk.namespace, conversation=talk.name)
    request.progress_interval.FromTimedelta(timedelta(milliseconds=100))
    call = client._link.conversations.WatchMessages(request)
    for _ in range(2):
        assert await call.read() == pb.WatchMessagesResponse()
    call.cancel()


async def test_repeat_returns_first_answer(client: memstream.Client, talk: Conversation) -> None:
    rpcs, named = client._link.conversations, {"namespace": talk.namespace, "conversation": talk.name}
    message = pb.ConversationMessage(conversation=talk.name, sender="joy", content="once")
    append = pb.AppendMessageRequest(namespace=talk.namespace, message=message, request_id="r")
    answers = await asyncio.gather(*(client._link.call(rpcs.AppendMessage, append) for _ in range(8)))
    assert {answer.message.number for answer in answers} == {1}
    assert await numbers(talk.messages()) == [1]
    delete = pb.DeleteMessagesRequest(request_id="r", **named)
    assert [(await client._link.call(rpcs.DeleteMessages, delete)).deleted for _ in range(2)] == [1, 1]
    save = pb.SavePlansRequest(plans=[pb.Plan(sub_task_number=1)], request_id="r", **named)
    first, second = [await client._link.call(rpcs.SavePlans, save) for _ in range(2)]
    assert first == second
    complete = pb.CompletePlanRequest(sub_task_number=1, result="x", request_id="r", **named)
    first_plan, second_plan = [await client._link.call(rpcs.CompletePlan, complete) for _ in range(2)]
    assert first_plan == second_plan
    message.content = "another"
    other = pb.AppendMessageRequest(namespace=talk.namespace, message=message, request_id="r")
    with pytest.raises(memstream.RequestIdConflict):
        await client._link.call(rpcs.AppendMessage, other)


@pytest.mark.parametrize(
    ("rpc", "request_message", "field"),
    [
        ("AppendMessage", {"message": {"conversation": "c"}}, "message.sender"),
        ("AppendMessage", {"message": {"conversation": "a/b", "sender": "j"}}, "message.conversation"),
        ("AppendMessage", {"message": {"conversation": "c", "sender": "j\n"}}, "message.sender"),
        ("AppendMessage", {"message": {"conversation": "c", "sender": "j", "rounds": -1}}, "message.rounds"),
        ("AppendMessage", {"message": {"conversation": "c", "sender": "j", "context": "{"}}, "message.context"),
        ("AppendMessage", {"message": {"conversation": "c", "sender": "j", "context": "NaN"}}, "message.context"),
        (
            "AppendMessage",
            {"message": {"conversation": "c", "sender": "j", "resource_info": "[" * 2_000}},
            "message.resource_info",
        ),
        ("AppendMessage", {"message": {"conversation": "c", "sender": "j", "content": "x" * 2_049}}, "message.content"),
        (
            "AppendMessage",
            {"message": {"conversation": "c", "sender": "j", "current_goal": "\0"}},
            "message.current_goal",
        ),
        ("ListMessages", {"conversation": "c", "other_agent": "j"}, "agent"),
        ("ListMessages", {"conversation": "c", "page_size": -1}, "page_size"),
        ("ListMessages", {"conversation": ""}, "conversation"),
        ("WatchMessages", {"conversation": "c", "after_number": -1}, "after_number"),
        ("WatchMessages", {"conversation": "c", "after_number": 2**40}, "after_number"),
        ("SavePlans", {"conversation": "c"}, "plans"),
        ("SavePlans", {"conversation": "c", "plans": [{"sub_task_number": 0}]}, "plans[0].sub_task_number"),
        ("SavePlans", {"conversation": "c", "plans": [{"sub_task_number": 1}] * 2}, "plans"),
        ("SavePlans", {"conversation": "c", "plans": [{"sub_task_number": 1, "rely": "x"}]}, "plans[0].rely"),
        ("SavePlans", {"conversation": "c", "plans": [{"sub_task_number": 1, "state": 77}]}, "plans[0].state"),
        (
            "SavePlans",
            {"conversation": "c", "plans": [{"sub_task_number": 1, "conversation": "d"}]},
            "plans[0].conversation",
        ),
        ("ListPlans", {"conversation": "c", "sub_task_numbers": [-1]}, "sub_task_numbers[0]"),
        ("UpdatePlan", {"conversation": "c", "sub_task_number": 1}, "state"),
        ("UpdatePlan", {"conversation": "c", "sub_task_number": 1, "retry_times": -1}, "retry_times"),
        ("CompletePlan", {"conversation": "c", "sub_task_number": 0}, "sub_task_number"),
    ],
)
async def test_bad_input_names_the_field(
    client: memstream.Client, rpc: str, request_message: dict[str, Any], field: str
) -> None:
    method = getattr(client._link.conversations, rpc)
    call = method(getattr(pb, f"{rpc}Request")(namespace="bad", **request_message))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if rpc == "WatchMessages" else call)
    error = translate_error(caught.value)
    assert isinstance(error, InvalidRequest)
    assert field in [violation.field for violation in error.violations]


async def test_token_of_other_listing_is_refused(client: memstream.Client, talk: Conversation) -> None:
    for _ in range(2):
        await talk.append("joy", "x")
    rpcs, named = client._link.conversations, {"namespace": talk.namespace, "conversation": talk.name}
    token = (await client._link.call(rpcs.ListMessages, pb.ListMessagesRequest(page_size=1, **named))).next_page_token
    with pytest.raises(memstream.PageTokenInvalid):
        await client._link.call(rpcs.ListMessages, pb.ListMessagesRequest(page_token=token, agent="joy", **named))


async def test_bad_path_is_refused_by_the_client(client: memstream.Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.conversation("monday")
    assert caught.value.violations[0].field == "conversation"


def test_sync_client(talking: ServerProcess, talk: Conversation) -> None:
    with memstream.sync.connect(talking.address) as client:
        conversation = client.conversation(talk.path)
        with conversation.watch() as watch:
            first = conversation.append("joy", "hello", **SAID)
            conversation.append("user", "hi")
            assert conversation.last_message().content == "hi"
            conversation.complete()
            assert [message.number for message in watch] == [1, 2]
            assert watch.number == 2
        assert next(conversation.messages("joy")) == first
        conversation.save_plans([Plan(number=1), Plan(number=2)])
        conversation.update_plan(1, state=PlanState.RETRYING)
        assert conversation.complete_plan(2, "done").state is PlanState.COMPLETE
        assert [plan.number for plan in conversation.plans(to_do=True)] == [1]
        assert (conversation.remove_plans(), conversation.delete_messages()) == (2, 2)


async def _code(channel: grpc.aio.Channel, rpc: str, data: bytes) -> grpc.StatusCode:
    method = f"/memstream.v1.ConversationService/{rpc}"
    try:
        if rpc == "WatchMessages":
            await channel.unary_stream(method)(data, timeout=0.2).read()
        else:
            await channel.unary_unary(method)(data, timeout=30.0)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@settings(max_examples=rounds(60, 25), suppress_health_check=list(HealthCheck))
@given(rpc=st.sampled_from(RPCS), data=st.binary(max_size=60) | st.builds(_near_a_request, st.binary(max_size=40)))
async def test_random_bytes_are_refused_or_answered(talking: ServerProcess, rpc: str, data: bytes) -> None:
    expected = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    if rpc == "WatchMessages":
        expected.add(grpc.StatusCode.DEADLINE_EXCEEDED)  # it waits for the first message
    async with grpc.aio.insecure_channel(talking.address) as channel:
        assert await _code(channel, rpc, data) in expected
