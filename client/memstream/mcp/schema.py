"""Types of the tools' arguments with their descriptions for models, and the JSON schema of a tool's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

LIST_MAX = 200
RECALL_MAX = 100
IDS_MAX = 1_000
CORRECTED_MAX = 100
FORGET_MAX = 20
"""Most fragments that a query forgets."""
_ALTERNATIVES, _NULL = "anyOf", {"type": "null"}
_WITHOUT = ("title", "default")
"""Keys that cost bytes in a model's context and tell it nothing."""


def _number_alone(value: object) -> object:
    """Rejects bools, which pydantic converts to 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


def _text_alone(value: object) -> object:
    """Rejects numbers, which pydantic interprets as seconds or milliseconds since 1970."""
    if not isinstance(value, str):
        raise ValueError("must be a time as text, for instance 2026-05-08T12:00Z")
    return value


_Time = Annotated[str | None, BeforeValidator(_text_alone)]

Words = Annotated[str, Field(min_length=1, description="One fact, in words that make sense on their own.")]
Query = Annotated[str, Field(min_length=1, description="A question or keywords.")]
Speaker = Annotated[str, Field(description="Who said it: 'user' or a name.")]
OfRole = Annotated[Literal["", "user", "assistant", "tool", "system"], Field(description="What the speaker is.")]
Session = Annotated[str, Field(description="Its conversation.")]
Importance = Annotated[
    float | None, BeforeValidator(_number_alone), Field(ge=0, le=1, description="Leave it out to let the server rate.")
]
Metadata = Annotated[
    dict[str, str | int | float | bool] | None, Field(description="Values to filter by: text, number, true or false.")
]
Key = Annotated[str, Field(description="Your own key: the same key again replaces the content.")]
When = Annotated[_Time, Field(description="When it was said: 2026-05-08, 2026-05-08T12:00Z, yesterday. Default: now.")]
ValidFrom = Annotated[_Time, Field(description="True from this time on.")]
ValidUntil = Annotated[_Time, Field(description="No longer true from this time on.")]
Ttl = Annotated[
    str, Field(pattern=r"^(\d+(\.\d+)? ?[smhdw])?$", description="Expires after this time: 90m, 12h, 30d, 2w.")
]
Ids = Annotated[list[str], Field(max_length=IDS_MAX, description="Ids, as recall and list give them.")]
Corrected = Annotated[
    list[str], Field(min_length=1, max_length=CORRECTED_MAX, description="Ids of what is no longer true.")
]
NewWords = Annotated[str, Field(description="What is true now. Or by.")]
By = Annotated[str, Field(description="The id of what is true now, as observe gave it; then no content.")]
Id = Annotated[str, Field(min_length=1, description="The id of a fragment, as recall and list give it.")]
ReceiptId = Annotated[str, Field(pattern=r"^[0-9A-Z]{26}$", description="The id of a receipt, as receipts gives it.")]
ReceiptsLimit = Annotated[
    int, BeforeValidator(_number_alone), Field(ge=1, le=RECALL_MAX, description="Maximum number of receipts.")
]
OfSpeaker = Annotated[str, Field(description="Only by this speaker.")]
With = Annotated[dict[str, str | int | float | bool] | None, Field(description="Only with these values.")]
OfSession = Annotated[str, Field(description="Only from this conversation.")]
Since = Annotated[_Time, Field(description="Only said since: 2026-05-08, today, or 7d for a week.")]
Until = Annotated[_Time, Field(description="Only said before; a day is included.")]
TimeZone = Annotated[str, Field(description="The user's, for dates: Europe/Berlin. Default UTC.")]
RecallLimit = Annotated[int, BeforeValidator(_number_alone), Field(ge=1, le=RECALL_MAX, description="Default 10.")]
Talk = Annotated[str, Field(description="NAMESPACE/NAME of a conversation whose end belongs to the text.")]
BlockNames = Annotated[list[str] | None, Field(max_length=20, description="Names of blocks that belong to the text.")]
SummaryName = Annotated[
    str, Field(description="Name of a block in place of the messages of the conversation that are cut.")
]
AfterTurn = Annotated[
    str,
    Field(description="As the last context that you still see ended: only what is new comes. Leave it out for all."),
]
TokenBudget = Annotated[
    int, BeforeValidator(_number_alone), Field(ge=100, le=100_000, description="Most tokens of the text. Default 2000.")
]
ListLimit = Annotated[int, BeforeValidator(_number_alone), Field(ge=1, le=LIST_MAX, description="Default 50.")]
After = Annotated[str, Field(description="The last id of the page before.")]
AsOf = Annotated[_Time, Field(description="Recall what was known at this time.")]
All = Annotated[bool, Field(description="Also what was corrected or is no longer true.")]
Containing = Annotated[str, Field(description="Only with this text in it.")]
ForgetQuery = Annotated[str, Field(description="Instead of ids: shows what would be forgotten.")]
Confirm = Annotated[bool, Field(description="With query: true forgets what it shows.")]
Memories = Annotated[
    list[str] | None, Field(description="Several memories, NAMESPACE/NAME, in one ranking.", max_length=100)
]
Where = Annotated[str, Field(description='Filter: metadata.n >= 3 and not speaker = "Bob".')]
Memory = Annotated[str, Field(description="Another memory, NAMESPACE/NAME.")]
BlockName = Annotated[str, Field(min_length=1, description="The name of the block.")]
BlockText = Annotated[str, Field(description="The whole text.")]
OldText = Annotated[str, Field(description="Text that occurs once in the block and is replaced.")]
NewText = Annotated[str, Field(description="What replaces it; without `old` it is added as last lines.")]
Etag = Annotated[str, Field(description="Refuse unless this is the block's present etag.")]


def arguments_model(tool: Callable[..., Awaitable[Any]], hidden: frozenset[str]) -> type[BaseModel]:
    """The arguments of a tool from its signature, without those that are `hidden`. Others are forbidden."""
    fields: dict[str, Any] = {
        name: (each.annotation, ... if each.default is each.empty else each.default)
        for name, each in inspect.signature(tool, eval_str=True).parameters.items()
        if name not in hidden
    }
    return create_model(tool.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def strict_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments in the words that every host knows: no union with null, no reference.

    An argument that may be absent is not `required`; null in its place is accepted without being announced.
    """
    schema = model.model_json_schema()
    properties = {name: _strict_property(each) for name, each in schema.get("properties", {}).items()}
    plain = {"type": "object", "properties": properties, "additionalProperties": False}
    return plain | ({"required": schema["required"]} if schema.get("required") else {})


def _strict_property(given: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in given.items() if key not in _WITHOUT}
    for alternative in found.pop(_ALTERNATIVES, ()):
        if alternative != _NULL:
            found = alternative | found
    for key, word in (("ge", "minimum"), ("le", "maximum")):
        if key in found:
            found[word] = found.pop(key)
    if found.get("type") == "object":
        found["additionalProperties"] = True  # values of several types: hosts differ in how they say that
    if "enum" in found:
        found["enum"] = [each for each in found["enum"] if each != ""]  # empty means absent
    return {"type": found.pop("type"), **found}
