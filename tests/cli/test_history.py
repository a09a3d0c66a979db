"""`memstream history`, and --as-of of recall, list and show, against a real server."""

from __future__ import annotations

import json

import memstream
import memstream.sync
from tests.cli.commands import call
from tests.cli.test_against_server import held, revision
from tests.support.server import ServerProcess

MEMORY = "history/joy"


def told(server: ServerProcess, *words: str) -> str:
    done = call(*words, target=server.address)
    assert done.returncode == 0, done.stderr
    return done.stdout


def put(server: ServerProcess, content: str) -> int:
    """Observe under one external_id; returns the revision after it."""
    line = json.dumps({"content": content, "external_id": "home"})
    done = call("observe", "--create", MEMORY, "-", stdin=f"{line}\n", target=server.address)
    assert done.returncode == 0, done.stderr
    return revision(server, MEMORY)


def test_history_is_shown_read_and_restored(server: ServerProcess) -> None:
    before = put(server, "Bob lives in Paris")
    put(server, "Bob lives in Rome")
    history = json.loads(told(server, "history", MEMORY, "--external-id", "home", "--json"))
    (version,) = history["versions"]
    assert (version["version"], version["fragment"]["content"]) == (before + 1, "Bob lives in Paris")
    shown = told(server, "history", MEMORY, history["fragment"]["id"])
    assert "Bob lives in Paris" in shown
    assert "updated" in shown
    for words in (("recall", MEMORY, "where is Bob?"), ("list", MEMORY), ("show", MEMORY, "--external-id", "home")):
        assert "Paris" in told(server, *words, "--as-of", str(before))
        assert "Rome" in told(server, *words)
    told(server, "history", MEMORY, "--external-id", "home", "--restore", str(version["version"]))
    assert held(server, MEMORY) == ["Bob lives in Paris"]
    refused = call("list", MEMORY, "--as-of", "9999", target=server.address)
    assert (refused.returncode, "in the future" in refused.stderr) == (1, True)
    unknown = call("history", MEMORY, "--external-id", "home", "--restore", "1", target=server.address)
    assert (unknown.returncode, "has no version 1" in unknown.stderr) == (4, True)


def test_as_of_rejects_what_it_cannot_mean() -> None:
    for words in (("recall", "a/b", "x", "--as-of", "soon"), ("show", "a/b", "--as-of", "7"), ("history", "a/b")):
        assert call(*words).returncode == 2, words
    followed = call("recall", "a/b", "x", "--follow", "--as-of", "7")
    assert (followed.returncode, "--as-of" in followed.stderr) == (2, True)


def test_receipts_are_listed_and_replayed(server: ServerProcess) -> None:
    memory = "history/receipts"
    said = call("observe", "--create", memory, "-", stdin="Bob lives in Paris\n", target=server.address)
    assert said.returncode == 0, said.stderr
    assert "no receipt" in call("receipts", memory, target=server.address).stderr
    receipt = json.loads(told(server, "recall", memory, "where is Bob?", "--receipt", "--json"))["receipt_id"]
    figures = told(server, "recall", memory, "Paris?", "--receipt")
    latest, first = map(json.loads, told(server, "receipts", memory, "--json").splitlines())
    assert f"receipt {latest['id']}" in figures
    assert (latest["what"], first["what"], first["id"]) == ("Paris?", "where is Bob?", receipt)
    shown = told(server, "receipts", memory)
    assert "where is Bob?" in shown
    assert receipt in shown
    replayed = told(server, "replay", memory, receipt)
    assert "Bob lives in Paris" in replayed
    assert "the same ranking" in replayed
    (id_,) = [one["fragment_id"] for one in first["ranking"]]
    told(server, "erase", memory, id_, "--wait", "--yes")
    assert "(erased)" in told(server, "receipts", memory)
    gone = call("replay", memory, receipt, target=server.address)
    assert (gone.returncode, f"fragment erased: {id_}" in gone.stdout, "query erased" in gone.stdout) == (1, True, True)
    assert call("replay", memory, "0" * 26, target=server.address).returncode == 4


def test_a_followed_answer_has_no_receipt() -> None:
    refused = call("recall", "a/b", "x", "--follow", "--receipt")
    assert (refused.returncode, "--receipt" in refused.stderr) == (2, True)


def test_sessions_are_listed_by_prefix_and_time(server: ServerProcess) -> None:
    memory = "history/sessions"
    lines = [
        {"content": "tea", "session": "mon", "speaker": "Ann", "observe_time": "2026-01-05T09:00:00Z"},
        {"content": "rain", "session": "tue\u202e", "speaker": "Bob", "observe_time": "2026-01-06T09:00:00Z"},
    ]
    stdin = "".join(f"{json.dumps(each)}\n" for each in lines)
    said = call("observe", "--create", memory, "-", stdin=stdin, target=server.address)
    assert said.returncode == 0, said.stderr
    found = [json.loads(line) for line in told(server, "sessions", memory, "--json").splitlines()]
    assert [(one["session"], one["fragments"]) for one in found] == [("tue\u202e", 1), ("mon", 1)]
    shown = told(server, "sessions", memory)
    assert "Ann" in shown
    assert "\u202e" not in shown
    assert "Bob" not in told(server, "sessions", memory, "--prefix", "mo")
    assert "Bob" not in told(server, "sessions", memory, "--until", "2026-01-05")
    assert "no session" in call("sessions", memory, "--since", "2026-01-07", target=server.address).stderr


def test_open_standing_queries_are_shown(server: ServerProcess) -> None:
    client = memstream.sync.connect(server.address)
    with client:
        memory = client.create_memory("history/queries", exist_ok=True)
        assert "no standing query" in call("queries", memory.path, target=server.address).stderr
        chosen = memstream.Filter(speakers=["Joy"])
        with memory.recall(session="monday") as stream, stream.subscribe("rain\u202e", filter=chosen):
            (one,) = memory.list_standing_queries()
            assert (one.what, one.session, one.options["filter"].speakers) == ("rain\u202e", "monday", ("Joy",))
            shown = told(server, "queries", memory.path)
            assert "monday" in shown
            assert "\u202e" not in shown
        assert list(memory.list_standing_queries()) == []
