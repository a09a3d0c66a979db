"""Checks what a server needs besides its directory: packages, a database, models, endpoints."""

from __future__ import annotations

import asyncio
import platform
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from importlib import metadata
from urllib.parse import urlsplit

from memstream_server.app.embedders import EMBEDDERS, Spending, current_embedder
from memstream_server.app.errors import StartError
from memstream_server.app.models import chat_of, embedding_models
from memstream_server.diagnosis.findings import Finding, fine, note, problem
from memstream_server.observability import Metrics
from memstream_server.ports.journal.spaces import Space
from memstream_server.ports.models import ModelError
from memstream_server.rpc.connections import RESERVED_DESCRIPTORS, ConnectionBounds, descriptor_limit
from memstream_server.settings import Settings

_PACKAGES = ("memstream", "grpcio", "protobuf", "sqlalchemy", "pymilvus", "milvus-lite", "numpy", "openai", "psycopg")
_ADVICE = "correct its settings, or start it: a server runs without it, with fewer features (docs/models.md)"
CONNECT_S = 5.0


def list_packages() -> Finding:
    """Versions of the installed packages."""
    found = [f"Python {platform.python_version()}", f"SQLite {sqlite3.sqlite_version}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return fine("packages", ", ".join(found))


def check_open_files(settings: Settings) -> Finding:
    """Whether the hard limit of open files allows the connections of the settings."""
    limit = descriptor_limit(hard=True)
    bounds = ConnectionBounds.from_settings(settings, limit)
    text = (
        f"at most {limit} (hard limit): {RESERVED_DESCRIPTORS} for data and models, {bounds.port_max} connections of a "
        f"port, {bounds.address_max} of one address"
    )
    if bounds.port_max < settings.port_connections_max:
        return note(
            "open files",
            f"{text}; port_connections_max is {settings.port_connections_max}",
            "raise the server's hard limit of open files (ulimit -Hn, LimitNOFILE of systemd), or lower the setting",
        )
    return fine("open files", text)


def check_embedding_model(settings: Settings, space: Space | None) -> Iterator[Finding]:
    """Whether the settings' embedding model is the model of the stored vectors."""
    name, dimension, why = _configured_model(settings)
    if why:
        yield problem("embedding", why, "correct the embedding settings")
    elif space is None:
        yield fine("embedding", f"{name}; no space is recorded yet")
    elif name != space.model or dimension not in (0, space.dimension):
        yield problem(
            "embedding",
            f"the vectors are of {space.model} ({space.dimension} dimensions), the settings name {name}: "
            "a server would fail with MODEL_MISMATCH",
            f"start it with {space.model}, or move the vectors to {name} with memstream reindex",
        )
    else:
        yield fine("embedding", f"{space.model}, {space.dimension} dimensions, as in the settings")


def check_reranker(settings: Settings) -> Iterator[Finding]:
    """Whether the settings' cross-encoder, if any, can be used."""
    if settings.reranker_model_dir is None:
        return
    from memstream_server.adapters.models.onnx_files import OnnxModelError
    from memstream_server.adapters.models.onnx_reranker import OnnxReranker

    try:
        yield fine("reranker", OnnxReranker(settings.reranker_model_dir).name)
    except OnnxModelError as error:
        yield problem("reranker", str(error), "correct reranker_model_dir, or leave it unset")


def _configured_model(settings: Settings) -> tuple[str, int, str]:
    """Name and dimension (0: unknown) of the settings' model, or why it is not available."""
    kind = EMBEDDERS[settings.embedding]
    if kind.remote:
        return current_embedder(settings).endpoint_model, 0, ""
    try:
        model = asyncio.run(kind.build(current_embedder(settings), settings, Spending.nowhere()).model())
    except StartError as error:
        return "", 0, str(error)
    return model.name, model.dimension, ""


def check_endpoints(settings: Settings) -> Iterator[Finding]:
    """Whether Milvus accepts connections, and the models' endpoints answer a harmless request."""
    if settings.milvus_uri:
        yield _check_connection("Milvus", settings.milvus_uri)
    metrics = Metrics()
    if any(EMBEDDERS[kind].remote for kind in (settings.embedding, settings.next_embedding) if kind is not None):
        yield from asyncio.run(_check_embedders(settings, metrics))
    if settings.llm_model:
        yield asyncio.run(_check_llm(settings, metrics))


async def _check_embedders(settings: Settings, metrics: Metrics) -> list[Finding]:
    models = embedding_models(settings, metrics)
    asked = [("embedding endpoint", settings.embedding, models.embedder)]
    if models.next is not None and settings.next_embedding is not None:
        asked.append(("next embedding endpoint", settings.next_embedding, models.next.embedder))
    found: list[Finding] = []
    for subject, kind, embedder in asked:
        if EMBEDDERS[kind].remote:
            try:
                model = await embedder.model()
                found.append(fine(subject, f"{model.name} answers with vectors of {model.dimension} dimensions"))
            except ModelError as error:
                found.append(note(subject, str(error), _ADVICE))
        await embedder.close()
    return found


async def _check_llm(settings: Settings, metrics: Metrics) -> Finding:
    chat = chat_of(settings, metrics)
    try:
        await chat.check_endpoint()
        return fine("LLM endpoint", f"{settings.llm_model} answers")
    except ModelError as error:
        return note("LLM endpoint", str(error), _ADVICE)
    finally:
        await chat.close()


def _check_connection(subject: str, url: str) -> Finding:
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        port = parts.port or {"https": 443, "http": 80}.get(parts.scheme, 19_530)
        with closing(socket.create_connection((host, port), CONNECT_S)):
            return fine(subject, f"{host}:{port} accepts connections")
    except (OSError, ValueError) as error:
        return note(subject, f"{host} cannot be reached ({error})", _ADVICE)
