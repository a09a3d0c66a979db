"""Several writes to conversations and state in one transaction, and what writes cost."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, update

from memstream_server.adapters.journal.sql import conversation_copies as copies
from memstream_server.adapters.journal.sql import conversation_records as records
from memstream_server.adapters.journal.sql import hidden_conversations as hidden
from memstream_server.adapters.journal.sql import messages, states
from memstream_server.adapters.journal.sql.answers import put_answer
from memstream_server.adapters.journal.sql.schema import conversations
from memstream_server.ports.conversation_records import (
    AdvanceFeed,
    AppendMessages,
    ConversationResult,
    ConversationWrite,
    DeleteConversation,
    DeleteState,
    JointWrites,
    RemoveMessages,
    ReplaceMessage,
    SetState,
    UpdateConversation,
)
from memstream_server.ports.conversations import Message
from memstream_server.ports.journal.errors import PreconditionFailed

BYTES_OF_ROW = 2_048
"""So many bytes of a body cost about as much as a row."""


def write_together(connection: Connection, joint: JointWrites) -> None:
    """Apply the writes, and store the answer that their results make."""
    put_answer(connection, joint.finish([_apply(connection, one, joint) for one in joint.writes]))


def _apply(connection: Connection, write: ConversationWrite, joint: JointWrites) -> ConversationResult:
    now_us, stored = joint.now_us, joint.stored
    match write:
        case AppendMessages():
            given = write.messages
            return messages.append_messages(connection, write.conversation, given, write.condition, now_us, stored)
        case ReplaceMessage():
            return messages.replace_message(connection, write.conversation, write.message, now_us, stored)
        case SetState():
            return states.set_state(connection, write.name, write.document, write.version, now_us, stored)
        case RemoveMessages():
            return copies.remove_at_once(connection, write.conversation, write.removal, now_us)
        case DeleteConversation():
            return records.delete_record(connection, write.conversation, write.last_number)
        case DeleteState():
            return states.delete_state(connection, write.name, write.version)
        case AdvanceFeed():
            _advance_feed(connection, write)
            return None
        case UpdateConversation():
            return records.update_record(connection, write.conversation, write.change, now_us)


def _advance_feed(connection: Connection, write: AdvanceFeed) -> None:
    table = conversations.c
    same = (table.number == write.number, table.feed_memory == write.memory, table.fed_number == write.from_number)
    advanced = update(conversations).where(*same).values(fed_number=write.to_number)
    if connection.execute(advanced).rowcount != 1:
        raise PreconditionFailed("the conversation was deleted, or is fed otherwise now")


def cost_rows(write: ConversationWrite, stored: messages.Stored) -> int:
    """What a write costs, in rows."""
    match write:
        case AppendMessages():
            return 2 + cost_messages(write.messages, stored)
        case ReplaceMessage():
            return 2 + cost_messages([write.message], stored)
        case SetState():
            return 3 + cost_document(write.document, stored)
        case RemoveMessages():
            return hidden.SLICE_ROWS
        case _:
            return 5


def cost_messages(given: Sequence[Message], stored: messages.Stored) -> int:
    """What messages cost, in rows, besides the parts of bodies that are written already."""
    left: int = sum(one.body_size_bytes for one in given if one.body not in stored)
    return len(given) + left // BYTES_OF_ROW


def cost_document(document: bytes, stored: messages.Stored) -> int:
    """What a document costs, in rows, if it is not written already."""
    return 0 if document in stored else len(document) // BYTES_OF_ROW
