"""`memstream verify` accepts the data of a server, and finds every kind of planted damage."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import memstream
from memstream_server.adapters.journal.sql import codec
from memstream_server.adapters.journal.verify.read_only_open import open_data_directory
from memstream_server.adapters.journal.verify.verify import verify_journal
from memstream_server.adapters.models.hashing import computed_spaces
from memstream_server.core.events import Event, EventType
from memstream_server.core.values import Enhancement
from tests.cli.commands import call
from tests.diagnosis.conftest import asked, changed, looked
from tests.server.conftest import MakeServer, started, stopped

ONE = "SELECT min(key) FROM fragments WHERE tier = 'long_term' AND memory = (SELECT max(number) FROM memories)"
"""A fragment of the last memory."""
TALK = "(SELECT number FROM conversations WHERE name = 'open')"
NAMED_IN_TEXT = ("store", "conversations", "messages", "plans", "states", "operations")
"""Checks that belong to no memory."""
FIRST = "(SELECT min(number) FROM memories)"


def test_server_data_verifies(data_dir: Path) -> None:
    code, answer = looked("verify", data_dir)
    assert (code, answer["ok"], answer["violations"], answer["compacted"]) == (0, True, [], {})
    assert answer["checked"]["memories"] == 3
    assert all(answer["checked"][name] > 0 for name in answer["checked"] if name not in ("outbox", "pending"))


def test_damaged_backup_does_not_verify(data_dir: Path, tmp_path: Path) -> None:
    backup = tmp_path / "monday.memstream"
    assert call("backup", str(backup), "--data", str(data_dir)).returncode == 0
    ended = call("verify", str(backup))
    assert ended.returncode == 0, ended.stderr
    assert "everything is as its events say" in ended.stdout
    with closing(sqlite3.connect(backup)) as connection, connection:
        connection.execute("DELETE FROM fragments WHERE key = (SELECT max(key) FROM fragments)")
    ended = call("verify", str(backup))
    assert ended.returncode == 1
    assert "does not exist, its events say it is in" in ended.stdout


def test_pruned_log_is_checked_from_its_start(data_dir: Path) -> None:
    changed(data_dir, f"DELETE FROM events WHERE key BETWEEN {FIRST} << 32 AND ({FIRST} << 32) + 3")
    changed(data_dir, f"DELETE FROM event_fragments WHERE memory = {FIRST} AND revision <= 3")
    code, answer = looked("verify", data_dir)
    assert (code, answer["violations"]) == (0, [])
    ((name, first),) = answer["compacted"].items()
    assert (name.partition("/")[0], first) == ("lived", 4)
    changed(data_dir, f"UPDATE memories SET revision = revision + 1 WHERE number = {FIRST}")
    assert looked("verify", data_dir)[1]["violated"]["revisions"] == 1


def _repacked(data_dir: Path, **changes: object) -> None:
    """Replace the record of one fragment."""
    blob = asked(data_dir, f"SELECT payload FROM fragments WHERE key = ({ONE})")[0][0]
    fragment = codec.decode_fragment(blob, 0, 0).but(**changes)
    changed(data_dir, f"UPDATE fragments SET payload = :blob WHERE key = ({ONE})", blob=codec.encode_record(fragment))


def _told(data_dir: Path, *events: Event) -> None:
    """Replace the last transition of the last memory."""
    changed(data_dir, "UPDATE events SET payload = :blob WHERE key = (SELECT max(key) FROM events)", blob=_log(*events))


def _log(*events: Event) -> bytes:
    return codec.encode_events(events)


def _sql(*statements: str) -> Callable[[Path], object]:
    return lambda data_dir: changed(data_dir, *statements)


DAMAGES: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "a fragment is gone": (
        "fragments",
        "does not exist, its events say",
        _sql(f"DELETE FROM fragments WHERE key = ({ONE})"),
    ),
    "a fragment nobody observed": (
        "fragments",
        "its events say it does not exist",
        lambda data_dir: _repacked(data_dir, id="NOBODY"),
    ),
    "a fragment twice": (
        "fragments",
        "exists twice",
        _sql(
            "DROP INDEX fragments_id",
            f"INSERT INTO fragments SELECT key + 5000, memory, id, tier, kind, due_time_us, forget_time_us, 0, 0,"
            f" session, speaker, NULL, '', payload, terms FROM fragments WHERE key = ({ONE})",
        ),
    ),
    "another tier": (
        "fragments",
        "tier is",
        lambda data_dir: _repacked(data_dir, tier="short_term"),
    ),
    "another importance": (
        "fragments",
        "importance is",
        lambda data_dir: _repacked(data_dir, importance=0.123),
    ),
    "another count of enhancements": (
        "fragments",
        "enhancement_count is 77",
        lambda data_dir: _repacked(data_dir, enhancement_count=77),
    ),
    "forgotten without an event": (
        "fragments",
        "forgotten is True",
        lambda data_dir: _repacked(data_dir, forget_time_us=5),
    ),
    "a suspicion about a stranger": (
        "conflicts",
        "is the older of a suspicion and is not in the memory",
        _sql(
            f"INSERT INTO conflicts SELECT memory, id, 'NOBODY', 'name', 1, '', '', NULL FROM fragments"
            f" WHERE key = ({ONE})"
        ),
    ),
    "a suspicion decided at no time": (
        "conflicts",
        "has a decision or its time, not both",
        _sql(
            f"INSERT INTO conflicts SELECT memory, id, id, 'name', 1, 'both', '', NULL FROM fragments"
            f" WHERE key = ({ONE})"
        ),
    ),
    "superseded without an event": (
        "fragments",
        "superseded_by is NOWHERE",
        lambda data_dir: _repacked(data_dir, superseded_by="NOWHERE"),
    ),
    "superseded by one from nowhere": (
        "chains",
        "which does not exist",
        lambda data_dir: _repacked(data_dir, superseded_by="NOWHERE"),
    ),
    "superseding one from nowhere": (
        "chains",
        "names NOWHERE as superseded, which does not exist",
        lambda data_dir: _repacked(data_dir, supersedes=("NOWHERE",)),
    ),
    "a version of no fragment": (
        "versions",
        "has no fragment",
        _sql("UPDATE versions SET key = key + 5000 WHERE key = (SELECT max(key) FROM versions)"),
    ),
    "a version that cannot be read": (
        "versions",
        "cannot be read",
        _sql("UPDATE versions SET payload = x'c1'"),
    ),
    "a version that no event replaced": (
        "versions",
        "the events of that revision do not say so",
        _sql("UPDATE versions SET event = 'promoted'"),
    ),
    "a version of the future": (
        "versions",
        "above the memory's revision",
        _sql("UPDATE versions SET replaced = replaced + 100000"),
    ),
    "a receipt of a recall that cannot be read": (
        "recall_receipts",
        "cannot be read",
        _sql("UPDATE recall_receipts SET payload = x'c1'"),
    ),
    "a receipt of another id": (
        "recall_receipts",
        "says that it is",
        _sql("UPDATE recall_receipts SET id = 'R' WHERE key = (SELECT max(key) FROM recall_receipts)"),
    ),
    "a receipt that no event names": (
        "recall_receipts",
        "is not named by an event of its revision",
        _sql("UPDATE recall_receipts SET key = key - 1 WHERE key = (SELECT min(key) FROM recall_receipts)"),
    ),
    "a receipt of the future": (
        "recall_receipts",
        "above the memory's revision",
        _sql("UPDATE recall_receipts SET key = key + 100000 WHERE key = (SELECT max(key) FROM recall_receipts)"),
    ),
    "a source from nowhere": (
        "lineage",
        "was never in this memory",
        lambda data_dir: _repacked(data_dir, sources=("NOWHERE",)),
    ),
    "changed by a revision to come": (
        "columns",
        "above the memory's revision",
        lambda data_dir: _repacked(data_dir, version=99_999),
    ),
    "a column that says otherwise": (
        "columns",
        "column speaker",
        _sql(f"UPDATE fragments SET speaker = 'somebody else' WHERE key = ({ONE})"),
    ),
    "a record that cannot be read": (
        "columns",
        "cannot be read",
        _sql(f"UPDATE fragments SET payload = x'01ffff' WHERE key = ({ONE})"),
    ),
    "a position not given": (
        "columns",
        "is not assigned yet",
        _sql("UPDATE memories SET next_position = 1"),
    ),
    "another count of fragments": (
        "memories",
        "that are not forgotten, and counts",
        _sql("UPDATE memories SET fragments = fragments + 1"),
    ),
    "a transition is gone": (
        "revisions",
        "follows",
        _sql("DELETE FROM events WHERE key = (SELECT max(key) - 1 FROM events)"),
    ),
    "the last transition is gone": (
        "revisions",
        "the log ends at",
        _sql("DELETE FROM events WHERE key = (SELECT max(key) FROM events)"),
    ),
    "an event of a fragment that was not there": (
        "revisions",
        "before it existed",
        lambda data_dir: _told(data_dir, Event(EventType.FORGOTTEN, "NOBODY")),
    ),
    "events that cannot be read": (
        "revisions",
        "cannot be read",
        _sql("UPDATE events SET payload = x'01c1' WHERE key = (SELECT max(key) FROM events)"),
    ),
    "a short-term side of a fragment in long-term": (
        "anchors",
        "is not held",
        lambda data_dir: changed(
            data_dir,
            "INSERT INTO anchors (memory, id, vector, enhancements)"
            f" SELECT memory, id, NULL, :none FROM fragments WHERE key = ({ONE})",
            none=codec.encode_record(()),
        ),
    ),
    "another enhancer": (
        "fragments",
        "enhancements is",
        lambda data_dir: changed(
            data_dir,
            "UPDATE anchors SET enhancements = :other",
            other=codec.encode_record((Enhancement("E", ""),)),
        ),
    ),
    "a short vector": (
        "vectors",
        "the space in force has 384",
        _sql(f"UPDATE vectors SET vector = zeroblob(400) WHERE key = ({ONE})"),
    ),
    "a vector of a model is lost": (
        "vectors",
        "has 0 bytes",
        _sql(f"UPDATE vectors SET model = 'another' WHERE key = ({ONE})"),
    ),
    "a vector is gone": (
        "vectors",
        "is missing",
        _sql(f"DELETE FROM vectors WHERE key = ({ONE})"),
    ),
    "a vector of no fragment": (
        "vectors",
        "which has no fragment",
        _sql("INSERT INTO vectors SELECT max(key) + 7, model, vector FROM vectors"),
    ),
    "stored beyond received": (
        "producers",
        "received and",
        _sql("UPDATE producers SET stored = received + 1 WHERE name = 'joy'"),
    ),
    "a receipt is gone": (
        "receipts",
        "producer joy",
        _sql("DELETE FROM receipts WHERE producer = 'joy' AND first_sequence = 1"),
    ),
    "received without a receipt": (
        "receipts",
        "receipts end at",
        _sql("UPDATE producers SET received = received + 1 WHERE name = 'sam'"),
    ),
    "receipts of nobody": (
        "receipts",
        "is not a producer of this memory",
        _sql("DELETE FROM producers WHERE name = 'sam'"),
    ),
    "too few hashes": (
        "receipts",
        "bytes of hashes",
        _sql("UPDATE receipts SET hashes = substr(hashes, 17) WHERE producer = 'sam'"),
    ),
    "a pending receipt that cannot be read": (
        "pending",
        "cannot be read",
        _sql("INSERT INTO observations SELECT max(key) + 1, memory, 'joy', 1, 1, x'01' FROM fragments"),
    ),
    "an index entry of nobody": (
        "outbox",
        "never in this memory",
        _sql("INSERT INTO outbox (memory, fragment, deleted) SELECT uid, 'NOBODY', 0 FROM memories"),
    ),
    "rows of no memory": (
        "store",
        "which does not exist",
        _sql("INSERT INTO producers (memory, name, epoch, received, stored) VALUES (99, 'stray', 1, 0, 0)"),
    ),
    "a message is gone": (
        "messages",
        "has 5 messages, 6 are counted",
        _sql(f"DELETE FROM messages WHERE key = {TALK} << 32 | 4"),
    ),
    "the last message is gone": (
        "messages",
        "has 5 messages, 6 are counted",
        _sql(f"DELETE FROM messages WHERE key = {TALK} << 32 | 7"),
    ),
    "a message under another number": (
        "messages",
        "message 8 has columns that differ",
        _sql(f"UPDATE messages SET key = key + 1 WHERE key = {TALK} << 32 | 7"),
    ),
    "a sender that says otherwise": (
        "messages",
        "message 4 has columns that differ",
        _sql(f"UPDATE messages SET sender = 'somebody else' WHERE key = {TALK} << 32 | 4"),
    ),
    "a message that cannot be read": (
        "messages",
        "message 4 cannot be read",
        _sql(f"UPDATE messages SET payload = x'c1' WHERE key = {TALK} << 32 | 4"),
    ),
    "a body in parts that has no message": (
        "messages",
        "has no message",
        _sql(
            "INSERT INTO conversations (namespace, name, last_number, completed, completions, completed_number,"
            " create_time_us) VALUES ('lived', char(10) || 'x', 0, false, 0, 0, 0)"
        ),
    ),
    "a body that lacks a part": (
        "messages",
        "message 1 lacks its body of 300000 bytes",
        _sql("DELETE FROM message_bodies WHERE key = (SELECT max(key) FROM message_bodies WHERE parts IS NULL)"),
    ),
    "completed in the middle": (
        "conversations",
        "completed 1 times, the last at message 7 of",
        _sql("UPDATE conversations SET last_number = 9 WHERE completed"),
    ),
    "completed at a message to come": (
        "conversations",
        "completed at message 99",
        _sql(f"UPDATE conversations SET completed_number = 99 WHERE number = {TALK}"),
    ),
    "a plan in another state": (
        "plans",
        "plan 7 has columns that differ",
        _sql("UPDATE plans SET state = 'complete' WHERE key & 4294967295 = 7"),
    ),
    "a plan that cannot be read": (
        "plans",
        "plan 2 cannot be read",
        _sql("UPDATE plans SET payload = x'c1' WHERE key & 4294967295 = 2"),
    ),
    "messages and plans of no conversation": (
        "store",
        "messages has rows of conversation number",
        _sql(f"DELETE FROM conversations WHERE number = {TALK}"),
    ),
    "a block of another name": ("blocks", "says that it is 1 of persona", _sql("UPDATE blocks SET name = 'x'")),
    "a block above the last version": ("blocks", "above the last one", _sql("UPDATE memories SET block_version = 1")),
    "a block that cannot be read": ("blocks", "cannot be read", _sql("UPDATE blocks SET payload = x'c1'")),
    "an operation in no state": (
        "operations",
        "its state 'lost' is unknown",
        _sql("UPDATE operations SET state = 'lost'"),
    ),
    "an operation that failed for no reason": (
        "operations",
        "it is failed without an error",
        _sql("UPDATE operations SET state = 'failed'"),
    ),
    "an operation that ended at no time": (
        "operations",
        "without an end time",
        _sql("UPDATE operations SET end_time_us = 0"),
    ),
    "an operation that is at work and has ended": (
        "operations",
        "with an end time",
        _sql("UPDATE operations SET state = 'running'"),
    ),
    "an operation that nobody can do": (
        "operations",
        "its payload is not JSON",
        _sql("UPDATE operations SET payload = '{'"),
    ),
    "an error that cannot be read": (
        "operations",
        "its error cannot be read",
        _sql("UPDATE operations SET state = 'failed', error = '{}'"),
    ),
    "a policy that cannot be read": (
        "memories",
        "cannot be read",
        _sql("UPDATE memories SET policy = '{'"),
    ),
    "a state that is no JSON": ("states", "is not JSON", _sql("UPDATE states SET document = x'7b'")),
    "a state without its conversation": (
        "states",
        "has no conversation",
        _sql("UPDATE states SET name = 'gone' WHERE scope = 'session'"),
    ),
    "a label finds nothing": (
        "memories",
        "is not found by its labels",
        _sql(f"INSERT INTO memory_labels VALUES ('lived', x'00', 'first', {FIRST})"),
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_planted_damage_is_found(data_dir: Path, name: str) -> None:
    check, text, damage = DAMAGES[name]
    damage(data_dir)
    with open_data_directory(data_dir) as opened:
        report = verify_journal(opened, lambda done, total: None, computed_spaces())
    found = [each for each in report.violations if each.check == check and text in each.text]
    assert found, report.violations
    assert report.violated[check] >= len(found)
    assert all(each.memory.startswith("lived/") for each in found) or check in NAMED_IN_TEXT


def test_violation_names_memory_and_fragment(data_dir: Path) -> None:
    ((id_, name),) = asked(
        data_dir, f"SELECT id, name FROM fragments JOIN memories ON memory = number WHERE key = ({ONE})"
    )
    _repacked(data_dir, importance=0.123)
    code, answer = looked("verify", data_dir)
    assert (code, answer["ok"]) == (1, False)
    ((memory, fragment, text),) = [(each["memory"], each["fragment"], each["text"]) for each in answer["violations"]]
    assert (memory, fragment) == (f"lived/{name}", id_)
    assert text.startswith("importance is 0.123, its events say ")


def test_unfinished_operation_is_reported(data_dir: Path) -> None:
    changed(
        data_dir,
        "UPDATE operations SET state = 'running', end_time_us = 0, done = 3, total = 1000, cancel_asked = 1,"
        " process = 77 WHERE id = (SELECT max(id) FROM operations)",
    )
    ((id_,),) = asked(data_dir, "SELECT max(id) FROM operations")
    code, answer = looked("verify", data_dir)
    assert (code, list(answer["unfinished"])) == (0, [id_])
    told = answer["unfinished"][id_]
    assert told.startswith("purge of lived/keyed, running, 3 of 1,000 fragments, asked for at 2")
    assert told.endswith(", to be cancelled, by server number 77, which is gone")
    assert f"operation {id_} has not ended: {told}" in call("verify", "--data", str(data_dir)).stdout
    code, answer = looked("doctor", data_dir)
    (note,) = [one for one in answer["findings"] if one["subject"] == "operations"]
    assert (code, note["level"], note["text"]) == (0, "note", f"{id_} has not ended: {told}")


def test_unverifiable_file_is_an_error(data_dir: Path, tmp_path: Path) -> None:
    changed(data_dir, "UPDATE alembic_version SET version_num = '9999'")
    code, answer = looked("verify", data_dir)
    assert (code, "revision 9999" in answer["error"]["message"]) == (1, True)
    shutil.rmtree(data_dir)
    code, answer = looked("verify", data_dir)
    assert (code, "no journal" in answer["error"]["message"]) == (1, True)
    (tmp_path / "notes").write_text("mine")
    assert call("verify", str(tmp_path / "notes")).returncode == 1


async def test_data_after_an_erasure_verifies(make_server: MakeServer, tmp_path: Path) -> None:
    """An erasure removes the receipts of what is stored: their hashes are traces of erased words."""
    server = await started(make_server("erased"))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("lived/erased")
        async with memory.observe("joy") as stream:
            await stream.send("tea")
            await stream.send("coffee")
            await stream.flush()
        (first, _) = [one async for one in memory.list_fragments()]
        await client.finished(await memory.erase_fragments([first.id]))
        await memory.observe_batch(["milk"], producer="joy", first_sequence=3)
    assert await stopped(server) == 0
    code, answer = await asyncio.to_thread(looked, "verify", server.data_dir)
    assert (code, answer["violations"]) == (0, [])
