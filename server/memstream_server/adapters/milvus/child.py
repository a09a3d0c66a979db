"""The Milvus Lite child process: serves one directory over gRPC on a private address until its parent ends.

Run by path (`python -P child.py OPTIONS`). From memstream it imports only what reduces its memory. One line of JSON on
stdout tells the parent the address, or why it cannot serve; standard error is for the log.

Rules
- One process per directory (Lite's own lock), and one writer at a time (a lock here: a call that the client has given
  up on may still run when the next one arrives).
- Acknowledged writes that were not flushed do not survive a restart: the caller sends them again. Lite's log is removed
  before opening, so neither its replay nor damage in it can delay a start.
- A flush is acknowledged after fsync. Lite itself syncs only the manifest, and deletes its log before that.
- Vectors stay arrays inside Lite (`read_by_column`).
- A damaged collection is dropped, and the caller fills it again. Lite only warns about missing files and would serve
  fewer rows than were flushed.
"""

from __future__ import annotations

import os

# Before the import of numpy or faiss: their spinning threads turn 0.4 ms into 8 ms on two busy cores.
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
"""Limit of an orderly stop, after which the process exits anyway."""

LOCK_POLL_S = 0.1

SOCKET_PATTERN = "milvus-*.sock"
"""Next to the directory, one per start."""

LITE_READ = "3.2.2"
"""The version of Lite whose internals `patch_lite` replaces and `StaleRows` uses."""

WRITES = ("Insert", "Upsert", "Delete", "CreateCollection", "DropCollection", "CreatePartition", "DropPartition")

PASSING_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EROFS}
)
"""Errors of the machine, not of the data: the files are kept, and opening is retried."""

Call = Callable[[Any, Any], Any]


class DirectoryInUseError(Exception):
    """Another process serves the directory. The operator reads the text."""


def is_machine_error(error: BaseException) -> bool:
    """Whether an error is about the state of the machine, not about damaged files."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in PASSING_ERRNOS)


def drop_path(path: Path) -> None:
    """Remove a file or directory. Renames it first, so that an interrupted removal leaves no partial directory."""
    doomed = path.with_name(f"{path.name}.dropped")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    if doomed.is_dir():
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        doomed.unlink(missing_ok=True)


def open_directory(directory: Path, lock_timeout_s: float) -> Any:
    """Open a directory with Lite; waits until a previous process that is still exiting releases the lock."""
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
            if is_machine_error(error) or dropped:
                raise
            logger.warning("%s is not a Milvus Lite directory, dropping it: %s", directory, error)
            drop_path(directory)
            dropped = True


def find_flaw(collection: Path) -> str | None:
    """Why the files of a collection are damaged, or None. Lite itself does not detect these defects."""
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
    """Load a collection if it exists; drop it if it is damaged."""
    collection = directory / "collections" / name
    if not collection.exists():
        return
    shutil.rmtree(collection / "wal", ignore_errors=True)
    reason = find_flaw(collection)
    if reason is None:
        try:
            database.get_collection(name)
        except Exception as error:  # Lite passes on any exception of its parsers
            if is_machine_error(error):
                raise
            reason = repr(error)
    if reason is not None:
        logger.warning("dropping collection %s, to be filled again: %s", name, reason)
        drop_path(collection)


def fsync_path(path: str) -> None:
    """Make a file or a directory's entries durable; a file that compaction has removed is skipped."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class FileSyncer:
    """Syncs Lite's data files, once each: they are never rewritten."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._synced = set(self._list_files())

    def _list_files(self) -> Iterator[str]:
        for folder, _, names in os.walk(self._root):
            for name in names:
                if name.endswith(".parquet"):
                    yield os.path.join(folder, name)

    def sync_new_files(self) -> None:
        """fsync the files that are new since the last call. Raises OSError."""
        files = set(self._list_files())
        new = files - self._synced
        for path in new:
            fsync_path(path)
        for folder in {os.path.dirname(path) for path in new}:
            fsync_path(folder)
        self._synced = files


def with_write_lock(call: Call, lock: threading.Lock) -> Call:
    """Wrap a call with the lock of all writes."""

    def call_locked(request: Any, context: Any) -> Any:
        with lock:
            return call(request, context)

    return call_locked


def with_fsync(flush: Call, files: FileSyncer) -> Call:
    """Wrap a flush so that it is acknowledged only after its files are synced."""

    def flush_and_sync(request: Any, context: Any) -> Any:
        response = flush(request, context)
        if response.status.code == 0:
            try:
                files.sync_new_files()
            except OSError as error:
                response.status.code = 1
                response.status.reason = f"fsync after flush: {error}"
        return response

    return flush_and_sync


class StaleRows:
    """Removes deleted and replaced rows from Lite's data files, for erasures: Lite itself keeps them until it merges
    files of one size. Rewrites the files that hold such rows, and those with the rows that replaced them."""

    def __init__(self, database: Any) -> None:
        self._database = database
        self._checked: dict[tuple[str, str], frozenset[str]] = {}
        """The files of a partition without such rows."""

    def rewrite(self, name: str) -> None:
        """Rewrite files of a collection whose writes are flushed."""
        collection = self._database.get_collection(name)
        collection._wait_for_bg()
        with collection._maintenance_lock:
            manifest = collection._manifest
            for partition in manifest.list_partitions():
                files = frozenset((*manifest.get_data_files(partition), *manifest.get_delta_files(partition)))
                if self._checked.get((name, partition)) != files:
                    self._rewrite_partition(collection, partition)
                    self._checked[name, partition] = frozenset(
                        (*manifest.get_data_files(partition), *manifest.get_delta_files(partition))
                    )
            collection._refresh_segment_cache()
            collection._cleanup_orphan_index_files()
        collection._ensure_loaded_segments_indexed()

    def _rewrite_partition(self, collection: Any, partition: str) -> None:
        import pyarrow.parquet as pq

        compaction, manifest = collection._compaction_mgr, collection._manifest
        folder = Path(compaction._data_dir) / "partitions" / partition
        places: dict[str, list[tuple[int, str]]] = {}
        for file in manifest.get_data_files(partition):
            table = pq.read_table(folder / file, columns=[compaction._pk_name, "_seq"])
            for key, number in zip(*(column.to_pylist() for column in table.columns), strict=True):
                places.setdefault(key, []).append((number, file))
        stale = {
            key
            for key, found in places.items()
            if len(found) > 1 or collection._delta_index.is_deleted(key, found[0][0])
        }
        files = sorted({file for key in stale for _, file in places[key]})
        if files:
            compaction._compact_files(partition, str(folder), files, manifest, collection._delta_index)


def serve_compaction(database: Any, files: FileSyncer) -> Call:
    """The call ManualCompaction, with which Lite does nothing. Its answer has another id than Lite's."""
    from pymilvus.grpc_gen import common_pb2, milvus_pb2

    rows = StaleRows(database)

    def compact(request: Any, _context: Any) -> Any:
        try:
            rows.rewrite(request.collection_name)
            files.sync_new_files()
        except Exception as error:  # as any failed write, it ends this process, and the caller repeats it
            return milvus_pb2.ManualCompactionResponse(status=common_pb2.Status(code=1, reason=repr(error)))
        return milvus_pb2.ManualCompactionResponse(status=common_pb2.Status(), compactionID=1)

    return compact


def hide_pandas() -> None:
    """Import pymilvus without pandas, then hide pandas: Lite needs neither it nor pyarrow's use of it."""
    from memstream_server.adapters.milvus.pandas_later import NoPandas, pandas_later

    with pandas_later():
        import pymilvus  # noqa: F401 - for its messages, which Lite imports
    sys.meta_path.insert(0, NoPandas())


def patch_lite() -> None:
    """Patch Lite so that it does not create a Python object for every number of a vector to check, log and flush it.

    Protobuf values are typed, Arrow rejects a wrong dimension, and no id exceeds its column. The patches apply only to
    the version that they were written for; other versions run unpatched.
    """
    import milvus_lite
    import pyarrow as pa
    import pyarrow.parquet as pq

    # For every version: its numbers hardly repeat, so a dictionary would be started and abandoned in every file.
    pq.write_table = functools.partial(pq.write_table, use_dictionary=False)
    if milvus_lite.__version__ != LITE_READ:
        return
    import numpy as np
    from milvus_lite.adapter.grpc.translators import records
    from milvus_lite.engine import collection
    from milvus_lite.exceptions import SchemaValidationError
    from milvus_lite.storage.memtable import MemTable

    def require_columns(record: dict[str, Any], schema: Any, **_properties: Any) -> None:
        for field in schema.fields:
            if field.name not in record:
                raise SchemaValidationError(f"column {field.name!r} missing")

    def read_vectors(field: Any, _kind: int, rows: int) -> list[Any]:
        numbers = np.array(field.vectors.float_vector.data, dtype=np.float32)
        return list(numbers.reshape(rows, field.vectors.dim))

    def build_table(memtable: Any, rows: list[tuple[int, int]]) -> Any:
        chosen: dict[int, list[int]] = {}
        for batch, row in rows:
            chosen.setdefault(batch, []).append(row)
        schema, batches = memtable._data_schema, memtable._insert_batches
        kept = [batches[batch].select(schema.names).take(pa.array(at)) for batch, at in chosen.items()]
        return pa.Table.from_batches(kept, schema=schema)

    records._extract_vector_column = read_vectors
    collection.validate_record = require_columns
    MemTable._build_data_table = build_table


def build_server(database: Any, directory: Path) -> Any:
    """Lite's gRPC server with one writer and durable flushes, not bound to an address yet."""
    import grpc
    import milvus_lite
    from milvus_lite.adapter.grpc.servicer import MilvusServicer
    from pymilvus.grpc_gen import milvus_pb2_grpc

    servicer = MilvusServicer(database)
    lock = threading.Lock()
    for name in WRITES:
        setattr(servicer, name, with_write_lock(getattr(servicer, name), lock))
    files = FileSyncer(directory / "collections")
    servicer.Flush = with_write_lock(with_fsync(servicer.Flush, files), lock)
    if milvus_lite.__version__ == LITE_READ:
        servicer.ManualCompaction = with_write_lock(serve_compaction(database, files), lock)
    bounds = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)]
    server = grpc.server(ThreadPoolExecutor(SEARCH_THREADS), options=bounds)
    milvus_pb2_grpc.add_MilvusServiceServicer_to_server(servicer, server)
    return server


def bind_server(server: Any, socket: str) -> str:
    """Bind to the unix socket, or to a free loopback port if it is empty; the address to connect to."""
    if not socket:
        return f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.add_insecure_port(f"unix:{socket}")
    return f"unix:{socket}"


def die_with_parent(parent: int) -> None:
    """Linux kills this process when its parent dies, even by kill -9; elsewhere the end of stdin ends it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent died before the call
        os._exit(0)


def watch_for_parent_exit() -> threading.Event:
    """Event that is set when stdin ends: the parent closed it or died. The process then exits within STOP_S."""
    ended = threading.Event()

    def read_until_end() -> None:
        while os.read(0, 4096):
            pass
        ended.set()
        time.sleep(STOP_S)
        os._exit(1)

    threading.Thread(target=read_until_end, name="stdin", daemon=True).start()
    return ended


def take_stdout() -> Callable[[dict[str, str]], None]:
    """Reserve stdout for the one line to the parent; other output goes to standard error."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send_message(message: dict[str, str]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.close()

    return send_message


def main() -> int:
    """Serve until stdin ends. Exit status 1 if the directory cannot be served."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument(
        "--collection", required=True, action="append", help="collection to load, dropped if damaged; repeatable"
    )
    parser.add_argument("--socket", default="", help="unix socket to create; a free loopback port if empty")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--lock-timeout-s", type=float, required=True)
    options = parser.parse_args()
    # A terminal's interrupt or a service manager's stop signals the whole group: the parent drains and then stops us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.umask(0o077)  # only this user can access files and socket
    die_with_parent(options.parent)
    send = take_stdout()
    ended = watch_for_parent_exit()
    logging.basicConfig(level=logging.WARNING, format="%(name)s %(levelname)s %(message)s")
    try:
        hide_pandas()
        patch_lite()
        database = open_directory(options.directory, options.lock_timeout_s)
        # We hold the lock, so these sockets belong to processes that have ended.
        for stale in options.directory.parent.glob(SOCKET_PATTERN):
            stale.unlink(missing_ok=True)
        for collection in options.collection:
            open_collection(database, options.directory, collection)
        server = build_server(database, options.directory)
        address = bind_server(server, options.socket)
    except Exception as error:  # reported to the parent, which decides; a traceback would only reach the log
        send({"failed": str(error) if isinstance(error, DirectoryInUseError) else repr(error)})
        return 1
    server.start()
    send({"ready": address})
    ended.wait()
    server.stop(5).wait()
    database.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
