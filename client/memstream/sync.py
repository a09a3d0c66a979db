"""The SDK for scripts without an event loop: the same names, each call waiting for its answer.

    with memstream.sync.connect("127.0.0.1:7700") as client:
        joy = client.create_memory("comedy/joy", exist_ok=True)
        with joy.observe(producer="joy-1") as stream:
            stream.send("user: My name is Bob")
        print(joy.recall_once("What's my name?")[0].fragment.content)

All clients share one event loop on one background thread (grpc.aio wants one a process); they may be used from any
thread but that one, and not after a fork. A program that runs an event loop of its own uses the asynchronous SDK.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from memstream import client as _client
from memstream.backoff import Retry
from memstream.channel import Tls
from memstream.codec import Observable
from memstream.errors import DeadlineExceeded, MemstreamError
from memstream.memory import AgentMemory as _AgentMemory
from memstream.memory import FragmentListing as _FragmentListing
from memstream.observe import ObserveStream as _ObserveStream
from memstream.policy import PolicyLike, Profile
from memstream.recall import RecallStream as _RecallStream
from memstream.resources import Cursor, Event, Memory, MemoryStats, Namespace, Operation, ServerInfo
from memstream.sent import Sent as _Sent
from memstream.sent import Stored
from memstream.values import (
    AckLevel,
    Answer,
    BatchResult,
    EventType,
    Filter,
    Fragment,
    MemoryKind,
    MetadataValue,
    ObservationFields,
    RecallOptions,
    Rejected,
    Structured,
    Tier,
)
from memstream.watch import Start
from memstream.watch import Watch as _Watch

T = TypeVar("T")
