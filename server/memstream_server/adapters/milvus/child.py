"""The Milvus Lite child process: opens one directory and serves its gRPC on a private address until its parent ends.

Run by path (`python -P child.py OPTIONS`); of memstream it imports what makes it smaller. One line of JSON on stdout
tells the parent that it serves, or why it cannot; standard error is for people.

Rules
- One process per directory (Lite's own lock), one writer at a time (a lock here: a call that the client gave up
  on may still be running when the next one comes).
- What Lite acknowledged but did not flush is not kept over a restart: the caller sends it again. Its log is
  removed before opening, so neither its replay nor a damaged log can hold up a start.
- A flush is acknowledged after fsync; Lite itself syncs only the manifest, and deletes its log before.
- Vectors stay arrays on their way through Lite (`read_by_column`).
- A collection that cannot be trusted is dropped: it is derived, the caller fills it again. Lite only warns of
  missing files and would come up with fewer rows than were flushed.
"""

from __future__ import annotations

import os

# Before numpy or faiss can be imported: their spinning threads turn 0.4 ms into 8 on a busy machine of two cores.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import contextlib
import errno
import functools
import json
import logging
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

logger = logging.getLogger("memstream.milvus_lite")

SEARCH_THREADS = 4
MESSAGE_BYTES_MAX = 256 * 1024 * 1024
STOP_S = 20.0
"""How long an orderly stop may take before the process ends anyway."""

LOCK_POLL_S = 0.1

SOCKET_PATTERN = "milvus-*.sock"
"""Beside the directory, one for each start."""

LITE_READ = "3.2.2"
"""The version of Lite whose inner functions `read_by_column` replaces."""

WRITES = ("Insert", "Upsert", "Delete", "CreateCollection", "DropCollection", "CreatePartition", "DropPartition")

PASSING_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EROFS}
)
"""Errors that say nothing about the data: it is kept, and opening it is tried again."""

Call = Callable[[Any, Any], Any]


class DirectoryInUseError(Exception):
    """Another process serves the directory; the text is shown to the operator."""


def passing(error: BaseException) -> bool:
    """Whether an error tells of the machine's state and not of damaged files."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in PASSING_ERRNOS)


def drop(path: Path) -> None:
    """Remove a file or directory; renamed first, so that an interrupted removal leaves nothing half open."""
    doomed = path.with_name(f"{path.name}.dropped")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    if doomed.is_dir():
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        doomed.unlink(missing_ok=True)


def open_directory(directory: Path, lock_timeout_s: float) -> Any:
    """Lite's database of a directory, waiting for a predecessor that is still dying to let go of its lock."""
    from milvus_lite.db import MilvusLite
    from milvus_lite.exceptions import DataDirLockedError

    deadline = time.monotonic() + lock_timeout_s
    dropped = False
    while True:
        try:
            return MilvusLite(str(directory))
        except DataDirLockedError:
            if time.monotonic() >= deadline:
                raise DirectoryInUseError(f"another process holds the lock of {directory}") from None
            time.sleep(LOCK_POLL_S)
        except (OSError, ValueError) as error:
            if passing(error) or dropped:
                raise
            logger.warning("%s is not a Milvus Lite directory, dropping it: %s", directory, error)
            drop(directory)
            dropped = True


def flaw(collection: Path) -> str | None:
    """Why the files of a collection cannot be trusted, or None. Lite itself overlooks these."""
    if not (collection / "schema.json").is_file():
        return "schema.json is missing"
    manifest = collection / "manifest.json"
    if not manifest.exists():
        return "manifest.json is missing" if any(collection.rglob("*.parquet")) else None
    try:
        for partition, files in json.loads(manifest.read_text())["partitions"].items():
            for file in (*files["data_files"], *files["delta_files"]):
                if not (collection / "partitions" / partition / file).is_file():
                    return f"{partition}/{file} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json is damaged: {error!r}"
    return None


def open_collection(database: Any, directory: Path, name: str) -> None:
    """Load a collection if there is one that can be trusted; drop it if there is one that cannot."""
    collection = directory / "collections" / name
    if not collection.exists():
        return
    shutil.rmtree(collection / "wal", ignore_errors=True)
    reason = flaw(collection)
    if reason is None:
        try:
            database.get_collection(name)
        except Exception as error:  # Lite raises whatever its parsers raise; each means the same here
            if passing(error):
                raise
            reason = repr(error)
    if reason is not None:
        logger.warning("dropping collection %s, to be filled again: %s", name, reason)
        drop(collection)


def fsync(path: str) -> None:
    """Make a file or a directory's entries durable; one that compaction removed meanwhile needs it no more."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Durable:
    """Brings Lite's data files, which are never rewritten, to the disk, each once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._synced = set(self._files())

    def _files(self) -> Iterator[str]:
        for folder, _, names in os.walk(self._root):
            for name in names:
                if name.endswith(".parquet"):
                    yield os.path.join(folder, name)

    def sync(self) -> None:
        """fsync what was written since the last time. Raises OSError."""
        files = set(self._files())
        new = files - self._synced
        for path in new:
            fsync(path)
        for folder in {os.path.dirname(path) for path in new}:
            fsync(folder)
        self._synced = files


def one_at_a_time(call: Call, lock: threading.Lock) -> Call:
    """The same call, under the lock of all writes."""

    def locked(request: Any, context: Any) -> Any:
        with lock:
            return call(request, context)

    return locked


def durable_flush(flush: Call, files: Durable) -> Call:
    """The same flush, acknowledged only once its files are on the disk."""

    def flushed(request: Any, context: Any) -> Any:
        response = flush(request, context)
        if response.status.code == 0:
            try:
                files.sync()
            except OSError as error:
                response.status.code = 1
                response.status.reason = f"fsync after flush: {error}"
        return response

    return flushed


def without_pandas() -> None:
    """pymilvus imports it, and pyarrow once it makes an array of a list; Lite has no use for it."""
    from memstream_server.adapters.milvus.pandas_later import NoPandas, pandas_later

    with pandas_later():
        import pymilvus  # noqa: F401 - for its messages, which Lite imports
    sys.meta_path.insert(0, NoPandas())


def read_by_column() -> None:
    """Keep Lite from making a Python object of every number of every vector, to check it, to log it and to flush it.

    What comes as protobuf has its types, Arrow refuses another dimension, and no id is longer than its column. Done to
    the version this was written against; another one works as it is.
    """
    import milvus_lite
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Whatever Lite is: a dictionary of numbers that hardly ever repeat is begun, and given up, in every file.
    pq.write_table = functools.partial(pq.write_table, use_dictionary=False)
    if milvus_lite.__version__ != LITE_READ:
        return
    import numpy as np
    from milvus_lite.adapter.grpc.translators import records
    from milvus_lite.engine import collection
    from milvus_lite.exceptions import SchemaValidationError
    from milvus_lite.storage.memtable import MemTable

    def whole(record: dict[str, Any], schema: Any, **_properties: Any) -> None:
        for field in schema.fields:
            if field.name not in record:
                raise SchemaValidationError(f"column {field.name!r} missing")

    def vectors(field: Any, _kind: int, rows: int) -> list[Any]:
        numbers = np.array(field.vectors.float_vector.data, dtype=np.float32)
        return list(numbers.reshape(rows, field.vectors.dim))

    def table(memtable: Any, rows: list[tuple[int, int]]) -> Any:
        chosen: dict[int, list[int]] = {}
        for batch, row in rows:
            chosen.setdefault(batch, []).append(row)
        schema, batches = memtable._data_schema, memtable._insert_batches
        kept = [batches[batch].select(schema.names).take(pa.array(at)) for batch, at in chosen.items()]
        return pa.Table.from_batches(kept, schema=schema)

    records._extract_vector_column = vectors
    collection.validate_record = whole
    MemTable._build_data_table = table


def build_server(database: Any, directory: Path) -> Any:
    """Lite's gRPC server with one writer and durable flushes, not yet bound to an address."""
    import grpc
    from milvus_lite.adapter.grpc.servicer import (
        MilvusServicer,
    )
    from pymilvus.grpc_gen import milvus_pb2_grpc

    servicer = MilvusServicer(database)
    lock = threading.Lock()
    for name in WRITES:
        setattr(servicer, name, one_at_a_time(getattr(servicer, name), lock))
    servicer.Flush = one_at_a_time(durable_flush(servicer.Flush, Durable(directory / "collections")), lock)
    server = grpc.server(
        ThreadPoolExecutor(SEARCH_THREADS),
        options=[
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.so_reuseport", 0),
        ],
    )
    milvus_pb2_grpc.add_MilvusServiceServicer_to_server(servicer, server)
    return server


def bind(server: Any, socket: str) -> str:
    """Bind to the unix socket, or to a free loopback port where it is empty; the address to connect to."""
    if not socket:
        return f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.add_insecure_port(f"unix:{socket}")
    return f"unix:{socket}"


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, also by kill -9; elsewhere the end of stdin must do."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before we asked
        os._exit(0)


def watch_stdin() -> threading.Event:
    """Set when stdin ends, as it does when the parent closes it or dies; the process then has STOP_S to end."""
    ended = threading.Event()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        ended.set()
        time.sleep(STOP_S)
        os._exit(1)

    threading.Thread(target=watch, name="stdin", daemon=True).start()
    return ended


def take_stdout() -> Callable[[dict[str, str]], None]:
    """Keep stdout for the one line to the parent; whatever else is printed goes to standard error."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(message: dict[str, str]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.close()

    return tell


def main() -> int:
    """Serve until stdin ends. Exit status 1 when the directory cannot be served."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument(
        "--collection", required=True, action="append", help="loaded before ready, dropped when damaged; several"
    )
    parser.add_argument("--socket", default="", help="unix socket to make; a free loopback port when empty")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--lock-timeout-s", type=float, required=True)
    options = parser.parse_args()
    # An interrupt of the terminal or a service manager's stop reaches the whole group: the parent drains, we follow.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.umask(0o077)  # files and socket are this user's alone
    die_with(options.parent)
    tell = take_stdout()
    ended = watch_stdin()
    logging.basicConfig(level=logging.WARNING, format="%(name)s %(levelname)s %(message)s")
    try:
        without_pandas()
        read_by_column()
        database = open_directory(options.directory, options.lock_timeout_s)
        # Under the lock, so these are sockets of the dead: a living server would have the lock.
        for stale in options.directory.parent.glob(SOCKET_PATTERN):
            stale.unlink(missing_ok=True)
        for collection in options.collection:
            open_collection(database, options.directory, collection)
        server = build_server(database, options.directory)
        address = bind(server, options.socket)
    except Exception as error:  # told to the parent, which decides; a traceback would only reach the log
        tell({"failed": str(error) if isinstance(error, DirectoryInUseError) else repr(error)})
        return 1
    server.start()
    tell({"ready": address})
    ended.wait()
    server.stop(5).wait()
    database.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
