"""What a server needs beside its directory: packages, a database, the embedding model, endpoints that answer."""

from __future__ import annotations

import platform
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from importlib import metadata
from urllib.parse import urlsplit

from memstream_server.diagnosis.findings import Finding, fine, note, problem
from memstream_server.ports.journal.spaces import Space
from memstream_server.settings import EmbeddingKind, Settings

_PACKAGES = ("memstream", "grpcio", "protobuf", "sqlalchemy", "pymilvus", "milvus-lite", "numpy", "httpx2", "psycopg")
_OPENAI = "https://api.openai.com/v1"
CONNECT_S = 5.0


def packages() -> Finding:
    """Versions, for a report."""
    found = [f"Python {platform.python_version()}", f"SQLite {sqlite3.sqlite_version}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return fine("packages", ", ".join(found))


def model_findings(settings: Settings, space: Space | None) -> Iterator[Finding]:
    """Whether the settings' embedding model is the one that the stored vectors are of."""
    name, dimension, why = _model(settings)
    if why:
        yield problem("embedding", why, "correct the embedding settings")
    elif space is None:
        yield fine("embedding", f"{name}; no space is recorded yet")
    elif name != space.model or dimension not in (0, space.dimension):
        yield problem(
            "embedding",
            f"the vectors are of {space.model} ({space.dimension} dimensions), the settings name {name}: "
            "a server would refuse with MODEL_MISMATCH",
            f"start it with {space.model}, or bring the vectors to {name} with memstream reindex",
        )
    else:
        yield fine("embedding", f"{space.model}, {space.dimension} dimensions, as the settings have it")


def reranker_findings(settings: Settings) -> Iterator[Finding]:
    """Whether the settings' cross-encoder, where they name one, can be used."""
    if settings.reranker_model_dir is None:
        return
    from memstream_server.adapters.models.onnx_files import OnnxModelError
    from memstream_server.adapters.models.onnx_reranker import OnnxReranker

    try:
        yield fine("reranker", OnnxReranker(settings.reranker_model_dir).name)
    except OnnxModelError as error:
        yield problem("reranker", str(error), "correct reranker_model_dir, or leave it unset")


def _model(settings: Settings) -> tuple[str, int, str]:
    """Name and dimension (0: not known) of the settings' model, or why it cannot be had."""
    import asyncio

    if settings.embedding is EmbeddingKind.OPENAI:
        return settings.embedding_model, 0, ""
    if settings.embedding is EmbeddingKind.HASHING:
        from memstream_server.adapters.models.hashing import HashingEmbedder

        told = asyncio.run(HashingEmbedder().model())
        return told.name, told.dimension, ""
    from memstream_server.adapters.models.onnx_embedder import OnnxEmbedder
    from memstream_server.adapters.models.onnx_files import OnnxModelError

    assert settings.embedding_model_dir is not None  # the settings see to it
    try:
        told = asyncio.run(OnnxEmbedder(settings.embedding_model_dir).model())
    except OnnxModelError as error:
        return "", 0, str(error)
    return told.name, told.dimension, ""


def endpoint_findings(settings: Settings) -> Iterator[Finding]:
    """Whether the endpoints that the settings name take connections."""
    wanted = [("Milvus", settings.milvus_uri)]
    if settings.embedding is EmbeddingKind.OPENAI:
        wanted.append(("embedding endpoint", settings.embedding_base_url or _OPENAI))
    if settings.llm_model:
        wanted.append(("LLM endpoint", settings.llm_base_url or _OPENAI))
    for subject, url in wanted:
        if url:
            yield _reached(subject, url)


def _reached(subject: str, url: str) -> Finding:
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        port = parts.port or {"https": 443, "http": 80}.get(parts.scheme, 19_530)
        with closing(socket.create_connection((host, port), CONNECT_S)):
            return fine(subject, f"{host}:{port} takes connections")
    except (OSError, ValueError) as error:
        advice = "correct its URL in the settings, or start it: until it answers recall goes by words alone"
        return note(subject, f"{host} cannot be reached ({error})", advice)
