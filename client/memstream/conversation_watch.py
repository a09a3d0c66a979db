"""The watch of a conversation: its messages as they arrive, across reconnections."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import grpc.aio

from memstream.channel import Link, MemoryPath
from memstream.conversation_values import Message, message_from_wire
from memstream.following import Following
from memstream.v1 import conversation_service_pb2 as pb
from memstream.wiretypes import duration_to_wire


class ConversationWatch(Following[Message, pb.WatchMessagesResponse]):
    """New messages, once each, across reconnections; iteration ends when the conversation is completed.

    `number` is the number of the last message returned: pass it to a later watch to resume. Waiting for the next
    message may be cancelled and resumed.
    """

    def __init__(
        self, link: Link, conversation: MemoryPath, after_number: int, progress_interval: timedelta | None
    ) -> None:
        super().__init__(link)
        self.number = after_number
        self._request = pb.WatchMessagesRequest(
            namespace=conversation.namespace,
            conversation=conversation.name,
            after_number=after_number,
            progress_interval=None if progress_interval is None else duration_to_wire(progress_interval),
        )

    def _open_call(self) -> grpc.aio.UnaryStreamCall[Any, pb.WatchMessagesResponse]:
        return self._link.conversations.WatchMessages(self._request, metadata=self._link.metadata())

    def _take_answer(self, answer: pb.WatchMessagesResponse) -> Iterable[Message]:
        if answer.messages:
            self._request.after_number = answer.messages[-1].number
        self._ended = answer.completed
        return [message_from_wire(wire) for wire in answer.messages]

    def _note_returned(self, item: Message) -> None:
        self.number = item.number
