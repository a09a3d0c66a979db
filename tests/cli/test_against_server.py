"""The command line against a real server in a separate process."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

import memstream.sync
from memstream_server.cli.feeds import load_sent_lines, producer_of_file
from tests.cli.commands import COMMAND, call, environment, run
from tests.support.forked import ForkedProgram
from tests.support.journals import DATABASE, only_sqlite
from tests.support.server import ServerProcess


def held(server: ServerProcess, memory: str) -> list[str]:
    done = call("list", memory, "--json", target=server.address)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["content"] for line in done.stdout.splitlines()]


def revision(server: ServerProcess, memory: str) -> int:
    """The memory's revision; 0 if there is no such memory."""
    stats = call("stats", memory, "--json", target=server.address)
    return int(json.loads(stats.stdout)["revision"]) if stats.returncode == 0 else 0


def written(directory: Path, name: str, *lines: str) -> str:
    (directory / name).write_text("".join(f"{line}\n" for line in lines))
    return str(directory / name)


@pytest.mark.parametrize("flags", [("--json",), ("--explain",)])
def test_follow_prints_changes_until_interrupted(server: ServerProcess, tmp_path: Path, flags: tuple[str]) -> None:
    memory = f"followed/{flags[0].strip('-')}"
    assert (
        call("observe", "--create", memory, written(tmp_path, "a", "the key is lost"), target=server.address).returncode
        == 0
    )
    words = ["recall", memory, "where is the key?", "-n", "1", "--follow", *flags]
    with ForkedProgram(words, environment(server.address)) as following:
        first = following.stdout.readline()
        assert "the key is lost" in first
        file = written(tmp_path, "b", "where is the key? the key is under the mat")
        assert call("observe", memory, file, target=server.address).returncode == 0
        told = ""
        while "under the mat" not in told:
            told += following.stdout.readline()
        following.send_signal(signal.SIGINT)
        told += following.stdout.read()
        assert following.wait(60) == 0
    if flags == ("--json",):
        (change,) = map(json.loads, told.splitlines())
        assert (len(change["entered"]), len(change["retracted"]), change["answer"]["recollections"][0]["rank"]) == (
            1,
            1,
            1,
        )
    else:
        assert first.startswith("+ ")
        left, entered, why = told.splitlines()[-3:]
        assert (left.startswith("- "), entered.startswith("+ "), "lexical" in why) == (True, True, True)


def test_follow_rejects_unsupported_flags() -> None:
    for flag in ("--working", "--reinforce"):
        done = call("recall", "demo/chat", "who?", "--follow", flag)
        assert (done.returncode, "--follow" in done.stderr) == (2, True)


def test_recall_prints_a_reply_under_its_message(server: ServerProcess, tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": "how do I reach the harbour?", "role": "user"}),
        json.dumps({"text": "take the tram over the iron bridge", "role": "assistant"}),
        json.dumps({"text": "who sells ladders?", "role": "butler"}),
    ]
    file = written(tmp_path, "chat", *lines[:2])
    assert call("observe", "--create", "replies/a", "--session", "s", file, target=server.address).returncode == 0
    asked = ("recall", "replies/a", "which tram reaches the harbour?")
    done = call(*asked, target=server.address)
    assert re.search(r"reach the harbour\?.*\n.*reply: .*\n?.*take the tram", done.stdout), done.stdout
    (hit,) = json.loads(call(*asked, "--json", target=server.address).stdout)["recollections"]
    assert hit["companion"]["fragment"]["content"] == "take the tram over the iron bridge"
    wrong = call("observe", "replies/a", written(tmp_path, "wrong", lines[2]), target=server.address)
    assert wrong.returncode != 0
    assert "role" in wrong.stderr
    assert len(held(server, "replies/a")) == 2


def test_observe_then_recall_with_reasons(server: ServerProcess, tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "chat.jsonl",
        '{"text": "My name is Bob", "speaker": "Bob", "session": "monday", "time": "2026-05-08T12:00:00Z"}',
        '{"text": "I keep bees on the roof", "speaker": "Bob", "metadata": {"page": 5}, "importance": 0.9}',
        '{"text": "The train leaves at noon", "speaker": "Ann", "time": "2020-01-01T00:00:00Z"}',
    )
    done = call("observe", "--create", "demo/chat", file, target=server.address)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 observations stored in demo/chat" in done.stdout

    asked = ["who kept bees before May 2023?", "--time-zone", "Europe/Berlin", "--weak-below", "1"]
    told = call("recall", "demo/chat", *asked, "-n", "1", "--explain", "--working", target=server.address)
    assert told.returncode == 0
    assert 'interpreted: "before May 2023" is before 2023-04-30 22:00' in told.stdout
    assert "(weak)" in told.stdout
    assert "I keep bees on the roof" in told.stdout
    assert "lexical" in told.stdout
    assert "came close" in told.stdout
    assert "working memory" in told.stdout

    answer = json.loads(
        call("recall", "demo/chat", "who keeps bees?", "--explain", "--json", target=server.address).stdout
    )
    best = answer["recollections"][0]
    assert best["fragment"]["content"] == "I keep bees on the roof"
    assert best["fragment"]["metadata"] == {"page": 5}
    parts = sum(part["contribution"] for part in best["explanation"]["parts"])
    assert parts == pytest.approx(best["score"])


def test_filters_choose(server: ServerProcess, tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "a.jsonl",
        '{"text": "bees in may", "speaker": "Bob", "session": "s1", "time": "2026-05-08", "metadata": {"page": 5}}',
        '{"text": "bees in june", "speaker": "Ann", "session": "s2", "time": "2026-06-08", "metadata": {"page": "5"}}',
        '{"text": "bees in july", "speaker": "Bob", "session": "s2", "time": "2026-07-08", "metadata": {"page": 6}}',
    )
    assert call("observe", "--create", "demo/filters", file, target=server.address).returncode == 0

    def chosen(command: str, *flags: str) -> list[str]:
        if command == "list":
            done = call("list", "demo/filters", "--json", *flags, target=server.address)
            return sorted(json.loads(line)["content"] for line in done.stdout.splitlines())
        done = call("recall", "demo/filters", "bees", "--json", *flags, target=server.address)
        return sorted(hit["fragment"]["content"] for hit in json.loads(done.stdout)["recollections"])

    for command in ("list", "recall"):
        assert chosen(command, "--speaker", "Bob") == ["bees in july", "bees in may"]
        assert chosen(command, "--session", "s2", "--speaker", "Ann") == ["bees in june"]
        assert chosen(command, "--since", "2026-06-08", "--until", "2026-07-07") == ["bees in june"]
        assert chosen(command, "--since", "2026-06-08", "--until", "2026-06-08") == ["bees in june"]
        for zone, found in (("Europe/Berlin", ["bees in june"]), ("America/Los_Angeles", [])):
            one_day = ("--since", "2026-06-08", "--until", "2026-06-08", "--time-zone", zone)
            assert chosen(command, *one_day) == found, zone
        assert chosen(command, "--metadata", "page=5") == ["bees in june", "bees in may"]
        assert chosen(command, "--metadata", 'page="5"') == ["bees in june"]
        assert chosen(command, "--metadata", "page=5", "--metadata", "page=6") == [
            "bees in july",
            "bees in june",
            "bees in may",
        ]
        assert chosen(command, "--speaker", " BOB", "--speaker", "Bobb") == ["bees in july", "bees in may"]
    assert chosen("list", "--tier", "sensory") == []
    typo = ("--speaker", "Bobb", "--session", "s1", "--metadata", "pag=5")
    said = 'filter: no fragment has the speaker "Bobb"\nfilter: no fragment has the metadata key "pag"\n'
    assert call("list", "demo/filters", "--json", *typo, target=server.address).stderr == said
    assert said in call("recall", "demo/filters", "bees", *typo, target=server.address).stdout


def test_recall_ranks_several_memories(server: ServerProcess, tmp_path: Path) -> None:
    for name in ("bob", "core"):
        file = written(tmp_path, name, f"{name} meets at the lake")
        assert call("observe", "--create", f"several/{name}", file, target=server.address).returncode == 0
    for flags, wanted in (
        (("--memory", "several/bob=0.5", "--memory", "several/core"), ["core", "bob"]),
        (("--prefix", "several/b"), ["bob"]),
        (("--memory", "several/bob", "--memory", "several/gone", "--partial"), ["bob"]),
    ):
        done = call("recall", *flags, "where do we meet, at the lake?", "--json", target=server.address)
        hits = json.loads(done.stdout)["recollections"]
        assert [one["fragment"]["content"].split()[0] for one in hits] == wanted, flags
    for wrong in (("a/b", "x", "--memory", "a/c"), ("x",), ("a/b", "x", "--partial"), ("--memory", "a/b=much", "x")):
        assert call("recall", *wrong, target=server.address).returncode == 2


def test_file_resumes_where_the_last_run_stopped(server: ServerProcess, tmp_path: Path) -> None:
    lines = [f"line number {number}" for number in range(150)]
    file = written(tmp_path, "log.txt", *lines[:100])
    assert call("observe", "--create", "demo/log", file, "--json", target=server.address).returncode == 0
    written(tmp_path, "log.txt", *lines)
    again = json.loads(call("observe", "demo/log", file, "--json", target=server.address).stdout)
    assert (again["feeds"][0]["skipped"], again["feeds"][0]["stored"]) == (100, 50)
    third = call("observe", "demo/log", file, target=server.address)
    assert "0 observations stored" in third.stdout
    assert "150 skipped" in third.stdout
    assert held(server, "demo/log") == lines


def test_changed_lines_are_refused_or_sent_by_choice(server: ServerProcess, tmp_path: Path) -> None:
    def observe(*lines: str, choice: str = "") -> tuple[int, str]:
        file = written(tmp_path, "diary.txt", *lines)
        flags = ("--changed", choice) if choice else ()
        done = call("observe", "--create", "demo/diary", file, *flags, target=server.address)
        return done.returncode, done.stdout + done.stderr

    assert observe("first", "two", "three")[0] == 0
    code, said = observe("first", "2", "three", "four")
    assert code == 2
    assert f"{tmp_path / 'diary.txt'}:2 is not what was sent before" in said
    assert "--changed send" in said
    assert held(server, "demo/diary") == ["first", "two", "three"]
    code, said = observe("first", "2", "between", "three", "four", choice="send")
    assert (code, "3 observations stored" in said, "2 skipped" in said) == (0, True, True)
    assert held(server, "demo/diary") == ["first", "two", "three", "2", "between", "four"]
    for _ in range(2):
        code, said = observe("first", "2", "between", "three", "four", "five")
        assert code == 0, said
    assert held(server, "demo/diary")[6:] == ["five"]
    assert observe("first", "2", "again", "between", "three", "four", "five")[0] == 2
    code, said = observe("first", "2", "again", "between", "three", "four", "five", "six", choice="skip")
    assert code == 0, said
    assert held(server, "demo/diary")[6:] == ["five", "six"]


def test_skipped_changes_are_not_asked_about_again(server: ServerProcess, tmp_path: Path) -> None:
    words = ("observe", "--create", "demo/skips")
    call(*words, written(tmp_path, "log.txt", "first", "two"), target=server.address)
    changed = written(tmp_path, "log.txt", "first", "2", "three")
    assert call(*words, changed, "--changed", "skip", target=server.address).returncode == 0
    assert call(*words, changed, target=server.address).returncode == 0
    assert held(server, "demo/skips") == ["first", "two", "three"]


def test_changed_file_is_sent_whole_to_a_restored_memory(server: ServerProcess, tmp_path: Path) -> None:
    file = written(tmp_path, "log.txt", "first", "two")
    words = ("observe", "--create", "demo/restored", file)
    assert call(*words, target=server.address).returncode == 0
    written(tmp_path, "log.txt", "first", "2")
    assert call(*words, "--changed", "send", target=server.address).returncode == 0
    with memstream.sync.connect(server.address) as client:
        info = client.memory("demo/restored").describe()
    record = load_sent_lines(info.uid, producer_of_file(file))
    assert record.diverged
    record.save(record.hashes, True, info.revision + 1)  # as if the memory had been restored from before
    refused = call(*words, target=server.address)
    assert (refused.returncode, "pass --no-resume" in refused.stderr.lower()) == (2, True)
    assert call(*words, "--no-resume", target=server.address).returncode == 0


def test_record_belongs_to_one_memory(server: ServerProcess, tmp_path: Path) -> None:
    file = written(tmp_path, "log.txt", "first", "two")
    for memory in ("demo/one", "demo/other"):
        assert call("observe", "--create", memory, file, target=server.address).returncode == 0
    written(tmp_path, "log.txt", "first", "2")
    assert call("observe", "demo/one", file, "--changed", "send", target=server.address).returncode == 0
    assert call("observe", "demo/other", file, target=server.address).returncode == 2
    assert held(server, "demo/other") == ["first", "two"]


def test_killed_observe_is_completed_by_a_repeat(server: ServerProcess, tmp_path: Path) -> None:
    lines = [f"unlike any other: {number * 7919}" for number in range(4_000)]
    file = written(tmp_path, "long.txt", *lines)
    words = ("observe", "--create", "demo/killed", file)
    with ForkedProgram(words, environment(server.address)) as first:
        deadline = time.monotonic() + 60
        while first.poll() is None and revision(server, "demo/killed") < 2 and time.monotonic() < deadline:
            pass
    done = call(*words, "--json", target=server.address)
    assert done.returncode == 0, done.stderr
    feed = json.loads(done.stdout)["feeds"][0]
    assert feed["skipped"] + feed["stored"] == len(lines)
    assert Counter(held(server, "demo/killed")) == Counter(lines)


def test_interrupted_pipe_reports_progress(server: ServerProcess) -> None:
    words = ("observe", "--create", "demo/interrupted")
    with ForkedProgram(words, environment(server.address)) as process:
        process.stdin.write("one\ntwo\n")
        process.stdin.flush()
        deadline = time.monotonic() + 60
        while revision(server, "demo/interrupted") == 0 or len(held(server, "demo/interrupted")) < 2:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        process.wait(60)
        said = process.stderr.read()
        assert process.returncode == 130
    assert re.search(r"standard input: interrupted, \d received of 2 sent; the rest of the pipe is not sent", said)
    assert "Traceback" not in said
    assert held(server, "demo/interrupted") == ["one", "two"]


def test_corrected_fact_is_recalled_alone_until_undone(server: ServerProcess) -> None:
    lines = [
        {"text": "Ann lives in Paris", "external_id": "paris"},
        {"text": "Ann lives in Berlin", "external_id": "berlin", "supersedes": "paris"},
        {"text": "Ann lives in Rome", "valid_until": "2020-01-01"},
    ]
    said = "".join(f"{json.dumps(line)}\n" for line in lines)
    assert call("observe", "--create", "demo/moved", stdin=said, target=server.address).returncode == 0

    def recalled(*options: str) -> str:
        done = call("recall", "demo/moved", "where does Ann live?", "--no-reinforce", *options, target=server.address)
        assert done.returncode == 0, done.stderr
        return done.stdout

    current = recalled()
    assert "Berlin" in current
    assert "Paris" not in current
    assert "Rome" not in current
    everything = recalled("--all")
    assert "(superseded by" in everything
    assert "(no longer valid)" in everything
    assert "superseded by" in recalled("--explain")
    (paris,) = [
        json.loads(line)["id"]
        for line in call("list", "demo/moved", "--json", target=server.address).stdout.splitlines()
        if "Paris" in line
    ]
    assert "1 current again" in call("supersede", "demo/moved", paris, "--undo", target=server.address).stdout
    assert "Paris" in recalled("--truth", "current")
    done = call("supersede", "demo/moved", paris, "--by-external-id", "berlin", "--json", target=server.address)
    assert json.loads(done.stdout) == {"memory": "demo/moved", "superseded": 1}
    for words in ((paris,), (paris, "--by", paris, "--undo"), ("--by", paris), (paris, "--by", paris)):
        assert call("supersede", "demo/moved", *words, target=server.address).returncode == 2, words
    unknown = call("supersede", "demo/moved", "--external-id", "nobody", "--by", paris, target=server.address)
    assert unknown.returncode == 4
    assert "nobody" in unknown.stderr


def test_a_suspicion_is_listed_and_decided(server: ServerProcess) -> None:
    said = "I live in Paris now.\nI live in Berlin now.\n"
    with memstream.sync.connect(server.address) as client:
        client.create_memory("demo/doubts", policy={"conflicts": {"ask_llm": True}})
    assert call("observe", "demo/doubts", stdin=said, target=server.address).returncode == 0
    found = json.loads(call("conflicts", "demo/doubts", "--json", target=server.address).stdout)["suspicion"]
    pair = (found["newer_id"], found["older_id"])
    listed = call("conflicts", "demo/doubts", target=server.address).stdout
    assert "Berlin" in listed.split("older")[0]
    done = call("conflicts", "demo/doubts", *pair, "--decide", "newer", "--note", "asked", target=server.address)
    assert done.stdout == "decided: newer\n"
    assert "decided: newer (asked)" in call("conflicts", "demo/doubts", "--decided", target=server.address).stdout
    assert "no open conflict" in call("conflicts", "demo/doubts", target=server.address).stdout
    assert call("conflicts", "demo/doubts", "--decide", "both", target=server.address).returncode == 2
    assert call("conflicts", "demo/doubts", *pair[::-1], "--decide", "both", target=server.address).returncode == 4


def test_two_pipes_with_same_content_are_both_kept(server: ServerProcess) -> None:
    for _ in range(2):
        done = call(
            "observe", "--create", "demo/pipe", "--kind", "long_term", stdin="the same words\n", target=server.address
        )
        assert done.returncode == 0, done.stderr
        assert "standard input: 1 observations stored" in done.stdout
    assert held(server, "demo/pipe") == [
        "the same words"
    ]  # the second counts as a repeated observation, not as a resend
    (line,) = call("list", "demo/pipe", "--json", target=server.address).stdout.splitlines()
    assert json.loads(line)["duplicate_count"] == 1


def test_rejected_lines_are_named_others_stored(server: ServerProcess, tmp_path: Path) -> None:
    file = written(tmp_path, "mixed.txt", "kept one", "x" * 70_000, "kept two")
    done = call("observe", "--create", "demo/rejected", file, target=server.address)
    assert done.returncode == 3
    assert "2 observations stored" in done.stdout
    assert "1 rejected" in done.stdout
    assert f"{file}:2: INVALID_FIELD" in done.stderr
    assert held(server, "demo/rejected") == ["kept one", "kept two"]
    assert call("observe", "demo/rejected", file, target=server.address).returncode == 0


def test_pipe_skips_and_names_malformed_lines(server: ServerProcess) -> None:
    lines = '{"text": "a"}\n{"txt": "b"}\n{"text": "c"}\n'
    done = run("observe", "--create", "demo/malformed", "--json", stdin=lines, target=server.address)
    assert done.returncode == 3
    said = json.loads(done.stdout)
    assert (said["rejected"], said["feeds"][0]["stored"]) == (1, 2)
    assert said["feeds"][0]["problems"][0]["line"] == 2
    assert held(server, "demo/malformed") == ["a", "c"]


def test_missing_resource_exits_4_invalid_name_2(server: ServerProcess) -> None:
    for words in (("stats", "demo/nothing"), ("recall", "demo/nothing", "q"), ("observe", "demo/nothing", "-")):
        done = run(*words, stdin="words\n", target=server.address)
        assert done.returncode == 4, words
        assert done.stderr.startswith("memstream: ")
        assert "demo/nothing" in done.stderr
        assert done.stderr.count("\n") == 1
    assert run("stats", "demo/in valid", target=server.address).returncode == 2


def shell(line: str, server: ServerProcess) -> subprocess.CompletedProcess[str]:
    """Runs a line in a shell."""
    words = ["bash", "-c", line.replace("memstream", shlex.join(COMMAND))]
    return subprocess.run(
        words, env=environment(server.address), capture_output=True, text=True, timeout=120, check=False
    )


def test_standard_stream_may_be_closed(server: ServerProcess) -> None:
    assert call("observe", "--create", "closed/joy", stdin="one\ntwo\n", target=server.address).returncode == 0
    assert shell("echo three | memstream observe closed/joy 2>&-", server).returncode == 0
    for line in ("observe closed/joy <&-", "list closed/joy >&-", "export closed/joy >&-", "info <&- 2>&-"):
        done = shell(f"memstream {line}", server)
        assert (done.returncode, done.stderr) == (0, ""), line
    assert held(server, "closed/joy") == ["one", "two", "three"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("words", ["list full/joy --json", "list full/joy", "show full/joy", "export full/joy"])
def test_failed_write_of_output_is_reported_in_one_line(server: ServerProcess, words: str) -> None:
    call("observe", "--create", "full/joy", stdin="one\n", target=server.address)
    done = shell(f"memstream {words} > /dev/full", server)
    assert done.returncode == 1
    assert done.stderr.startswith('{"error": ' if "--json" in words else "memstream: ")
    assert "No space left" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_broken_pipe_ends_the_command_quietly(server: ServerProcess) -> None:
    call("observe", "--create", "pipe/joy", stdin="words\n" * 5_000, target=server.address)
    for words in ("list pipe/joy --json", "export pipe/joy"):
        done = shell(f"memstream {words} | head -c 10", server)
        assert (len(done.stdout), done.stderr) == (10, ""), words


def test_list_show_stats_info(server: ServerProcess) -> None:
    call("observe", "--create", "shelf/one", "--profile", "dbgpt", stdin="alpha\nbeta\ngamma\n", target=server.address)
    (shelf,) = (
        one
        for one in map(json.loads, call("list", "--json", target=server.address).stdout.splitlines())
        if one["name"] == "shelf"
    )
    assert (shelf["memories"], shelf["receipts_bytes_max"], shelf["stored"]["receipts"]) == (1, 1 << 30, 0)
    assert 0 < shelf["stored"]["fragments"] < shelf["stored"]["total"]
    row = next(line for line in call("list", target=server.address).stdout.splitlines() if "shelf" in line)
    assert row.split() == ["shelf", "1", f"{shelf['stored']['total']:,}", "no", "limit", "0", "0%"]
    assert "shelf/one" in call("list", "shelf", target=server.address).stdout
    assert "no memory with these labels" in call("list", "shelf", "--label", "team=core", target=server.address).stderr
    assert "there are more" in call("list", "shelf/one", "--limit", "2", target=server.address).stderr
    fragment = json.loads(call("list", "shelf/one", "--json", "--limit", "1", target=server.address).stdout)
    assert "alpha" in call("show", "shelf/one", fragment["id"], target=server.address).stdout
    memory = json.loads(call("show", "shelf/one", "--json", target=server.address).stdout)
    assert memory["policy"]["profile"] == "dbgpt"
    assert "recall.limit" in call("show", "shelf/one", target=server.address).stdout
    stats = json.loads(call("stats", "shelf/one", "--json", target=server.address).stdout)
    assert stats["sensory"] + stats["short_term"] + stats["long_term"] == 3
    info = json.loads(call("info", "--json", target=server.address).stdout)
    assert info["embedding"]["dimension"] == 384
    assert ("postgresql" if DATABASE else "sqlite") in call("info", target=server.address).stdout


@only_sqlite("`backup` copies a data directory; for a database it is pg_dump")
def test_backup_of_running_server_can_be_restored(server: ServerProcess, tmp_path: Path) -> None:
    call("observe", "--create", "demo/saved", stdin="the bees are on the roof\n", target=server.address)
    copy, place = str(tmp_path / "copy"), str(tmp_path / "data")
    made = call("backup", copy, "--data", str(server.data_dir), "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["bytes"] == Path(copy).stat().st_size
    assert call("backup", copy, "--data", str(server.data_dir)).returncode == 2

    running = call("restore", copy, "--data", str(server.data_dir), "--force")
    assert running.returncode == 1
    assert "in use" in running.stderr

    assert call("restore", copy, "--data", place).returncode == 0
    assert call("restore", copy, "--data", place).returncode == 2
    forced = call("restore", copy, "--data", place, "--force")
    assert "the previous journal was replaced" in forced.stdout
    with ServerProcess(Path(place)) as other:
        told = json.loads(call("recall", "demo/saved", "bees", "--json", target=other.address).stdout)
        assert told["recollections"][0]["fragment"]["content"] == "the bees are on the roof"
        assert other.stop() == 0


@only_sqlite("several servers share a database: tests/toolchains/test_without_index.py")
def test_serve_announces_and_ends_on_sigterm(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as first:
        second = run("serve", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
        assert first.stop() == 0
    assert f"listens on {first.address}" in first.log()
    assert "hashing" in first.log()
    assert second.returncode == 1
    assert "in use" in second.stderr
    assert "Traceback" not in second.stderr


@only_sqlite("a data directory has a format; for a database see tests/toolchains/test_postgres.py")
def test_serve_rejects_newer_format_and_used_port(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "format").write_text("memstream data directory, format 99\n")
    newer = run("serve", "--data", str(tmp_path), "--listen", "127.0.0.1:0")
    assert newer.returncode == 1
    assert "start a newer memstream" in newer.stderr
    taken = run("serve", "--data", str(tmp_path / "other"), "--listen", server.address)
    assert taken.returncode == 1
    assert f"memstream: the server cannot run: cannot listen at {server.address}" in taken.stderr
    assert "Traceback" not in newer.stderr + taken.stderr


def test_create_rejects_existing_memory_of_other_kind(server: ServerProcess) -> None:
    made = call("observe", "--create", "--kind", "sensory", "kinds/joy", stdin="one\n", target=server.address)
    assert made.returncode == 0, made.stderr
    again = call("observe", "--create", "kinds/joy", stdin="two\n", target=server.address)
    assert again.returncode == 0, again.stderr
    other = call("observe", "--create", "--kind", "hybrid", "kinds/joy", stdin="three\n", target=server.address)
    assert other.returncode == 1
    assert "kinds/joy exists and differs in kind (sensory, not hybrid)" in other.stderr


def test_blocks_are_written_edited_and_deleted(server: ServerProcess) -> None:
    def said(*arguments: str) -> str:
        return call("blocks", *arguments, target=server.address).stdout

    with memstream.sync.connect(server.address) as client:
        client.create_memory("blocks/joy")
    task = "blocks/joy#task"
    assert said(task, "--put", "Tell a joke", "--max-tokens", "9") == f"{task} is version 1, 3 of 9 tokens\n"
    said(task, "--append", "Be brief")
    said(task, "--replace", "a joke", "jokes")
    said(task, "--insert", "0", "# Task")
    assert said(task) == "# Task\nTell jokes\nBe brief\n"
    assert said(task, "--version", "1") == "Tell a joke\n"
    assert [json.loads(line)["version"] for line in said(task, "--versions", "--json").splitlines()] == [4, 3, 2, 1]
    assert said("blocks/joy").splitlines()[-1].split()[:4] == ["task", "4", "7", "9"]
    stale = call("blocks", task, "--append", "x", "--etag", "1", target=server.address)
    assert (stale.returncode, "was written since" in stale.stderr) == (1, True)
    assert (said(task, "--delete"), said(task, "--delete")) == (f"deleted {task}\n", f"there is no {task}\n")
    assert call("blocks", task, target=server.address).returncode == 4
    kept = said("blocks/joy#bob", "--keep", "Who is Bob?", "--ask", "blocks/joy", "--ask", "blocks/nobody", "--json")
    assert json.loads(kept)["standing"]["scopes"] == ["blocks/joy", "blocks/nobody"]
    wrong = ((task, "--put", "x", "--delete"), ("blocks/joy", "--put", "x"), (task, "--max-tokens", "3"))
    for words in (*wrong, (task, "--ask", "blocks/joy")):
        assert call("blocks", *words, target=server.address).returncode == 2, words


def test_conversations_are_listed_shown_and_deleted(server: ServerProcess) -> None:
    def said(*arguments: str) -> str:
        return call("conversations", *arguments, target=server.address).stdout

    with memstream.sync.connect(server.address) as client:
        for name, user in (("run-1", "bob"), ("run-2", "ann")):
            talk = client.conversation(f"chats/{name}")
            talk.update(labels={"user": user}, create=True)
            talk.append_messages(
                [
                    memstream.NewMessage(role="user", content="Is it raining?"),
                    memstream.NewMessage(body='{"to": "Rome"}'),
                ]
            )
    listed = said("chats", "--latest")
    assert listed.index("run-2") < listed.index("run-1")
    assert "user=bob" in said("chats", "--label", "user=bob", "--prefix", "run")
    assert "run-2" not in said("chats", "--label", "user=bob")
    assert [json.loads(line)["message_count"] for line in said("chats", "--json").splitlines()] == [2, 2]
    assert said("chats/run-1").splitlines()[0].endswith("user: Is it raining?")
    assert [line.split()[:2] for line in said("chats", "--find", "Rome").splitlines()] == [
        ["chats/run-1", "2"],
        ["chats/run-2", "2"],
    ]
    assert said("chats/run-1", "--delete") == "deleted chats/run-1, 2 messages\n"
    assert call("conversations", "chats/run-1", target=server.address).returncode == 4
    for words in (("chats", "--delete"), ("chats/run-2", "--prefix", "r"), ("chats", "--label", "x")):
        assert call("conversations", *words, target=server.address).returncode == 2, words


def test_context_shows_the_text_and_its_parts(server: ServerProcess, tmp_path: Path) -> None:
    memory, file = "contexts/joy", written(tmp_path, "a", "the key is under the mat")
    assert call("observe", "--create", memory, file, target=server.address).returncode == 0
    words = ("context", "where is the key?", "-m", memory, "--now", "2026-05-08T00:00:00Z")
    shown = call(*words, target=server.address)
    assert shown.returncode == 0, shown.stderr
    for text in ("As of 8 May 2026:", "the key is under the mat", "user: where is the key?", "evidence", "question"):
        assert text in shown.stdout
    given = json.loads(call(*words, "--json", target=server.address).stdout)
    assert given["text"].endswith("user: where is the key?\n\n")
    assert sum(part["tokens"] for part in given["parts"]) == given["tokens"]
    assert call("context", "why?", "--budget", "1", target=server.address).returncode == 2
    summary = ("context", "why?", "-m", memory, "--summary", f"{memory}#gist")
    assert "name one" in call(*summary, target=server.address).stderr
    assert "no block contexts/joy#gist" in call(*summary, "--conversation", memory, target=server.address).stderr
