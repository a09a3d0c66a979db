"""Tests read no private attribute of the product through another object, apart from the ones listed here.

Such a test breaks by a name and not by a promise. tests/engine/engine_parts.py gives an engine's parts public names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from tests.support.pages import ROOT

ALLOWED: dict[str, set[str]] = {
    "tests/access/test_admission.py": {"_paid_until", "_rates", "_under_way"},
    "tests/access/test_parts.py": {"_settings"},
    "tests/client/test_recall.py": {"_link"},
    "tests/conversations/test_messages.py": {"_link"},
    "tests/conversations/test_records.py": {"_link"},
    "tests/conversations/test_service.py": {"_link"},
    "tests/conversations/test_watching.py": {"_waiting"},
    "tests/engine/engine_parts.py": {"_write_accesses"},
    "tests/engine/test_at_once.py": {"_inbox"},
    "tests/engine/test_bounds.py": {"_epochs"},
    "tests/engine/test_erasing.py": {"_call"},
    "tests/engine/test_fragments.py": {"_content_vectors"},
    "tests/engine/test_images.py": {"_background", "_evict_actor", "_pack"},
    "tests/engine/test_indexing.py": {"_reconciler"},
    "tests/engine/test_languages.py": {"_loaded"},
    "tests/engine/test_large.py": {"_scans"},
    "tests/engine/test_models.py": {"_run_job", "_run_round"},
    "tests/engine/test_recall_receipts.py": {"_inbox"},
    "tests/engine/test_reembedding.py": {"_backfill_leftovers"},
    "tests/engine/test_registry.py": {"_created"},
    "tests/engine/test_turns.py": {"_granted", "_queue", "_resuming", "_shares", "_threads"},
    "tests/engine/test_working_set.py": {"_analyzer", "_pending"},
    "tests/http_port/test_listener.py": {"_server"},
    "tests/index/test_milvus_child.py": {"_readers"},
    "tests/journal/conformance/suite.py": {"_read"},
    "tests/journal/writes.py": {"_writer"},
    "tests/journal/test_faults.py": {"_WRITER", "_database", "_writer"},
    "tests/journal/test_lists.py": {"_database"},
    "tests/models/test_languages.py": {"_loaded"},
    "tests/models/test_onnx_reranker.py": {"_session"},
    "tests/models/test_openai_chat.py": {"_read_whole"},
    "tests/models/test_openai_chat_answers.py": {"_kept"},
    "tests/models/test_per_namespace.py": {"_Kept", "_Words", "_caches", "_entries", "_lexicons", "_stemmer", "_words"},
    "tests/models/test_spellings.py": {"_words"},
    "tests/rpc/test_grpc_options.py": {"_OPTIONS", "_PING_STRIKES"},
    "tests/rpc/test_observe.py": {"_check_window"},
    "tests/rpc/test_request_reader.py": {"_accounts"},
    "tests/server/test_browsing.py": {"_link"},
    "tests/server/test_erase.py": {"_vector"},
    "tests/server/test_event_loop.py": {"_is_poller"},
    "tests/server/test_lifecycle.py": {"_link"},
    "tests/server/test_many_streams.py": {"_link", "_open", "_stubs"},
    "tests/server/test_storage.py": {"_writer"},
    "tests/support/scripted_observe.py": {"_stored"},
    "tests/support/statement_recorder.py": {"_engine"},
    "tests/test_docs.py": {"_BY_REASON"},
    "tests/toolchains/test_engine_leases.py": {"_database"},
    "tests/toolchains/test_ownership.py": {"_writer"},
    "tests/toolchains/test_postgres.py": {"_database", "_writer"},
    "tests/toolchains/with_dbgpt/defects.py": {"_fragments", "_lock"},
    "tests/toolchains/with_dbgpt/tiers.py": {"_fragments"},
    "tests/toolchains/with_langgraph/conformance.py": {"_namespace", "_refresh"},
}
"""The private attributes that a file still reads. Take away what is no longer read, and add nothing."""
PRODUCT = ("server/memstream_server", "client/memstream")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def find_own_names(tree: ast.Module) -> set[str]:
    """The private names that a module defines: methods, functions, classes, fields and attributes of self."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


@cache
def private_names_of_the_product() -> frozenset[str]:
    files = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")]
    return frozenset(name for file in files for name in find_own_names(ast.parse(file.read_text("utf-8"))))


def find_reads(text: str) -> Iterator[str]:
    """The product's private attributes that a test file reads of another object than its own."""
    tree = ast.parse(text)
    foreign = private_names_of_the_product() - {
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in foreign:
            of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not of_itself:
                yield node.attr


def test_tests_read_no_further_private_attribute() -> None:
    read = {}
    for file in sorted((ROOT / "tests").rglob("*.py")):
        if found := set(find_reads(file.read_text("utf-8"))):
            read[file.relative_to(ROOT).as_posix()] = found
    assert read == ALLOWED


def test_a_read_through_another_object_is_found() -> None:
    text = "async def test(engine):\n    await engine._journal.close()\n    self._journal = engine\n"
    assert list(find_reads(text)) == ["_journal"]
