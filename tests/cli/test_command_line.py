"""Parsing, help and failures, without a server."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from memstream import errors
from memstream_server.cli import server as server_module
from memstream_server.cli.data import backup_command
from memstream_server.cli.failures import EXIT_CODES, Exit, Failure, Missing, Misuse
from memstream_server.cli.group import COMMANDS, root
from memstream_server.cli.options import metadata_readings
from memstream_server.cli.serve import serve_command
from memstream_server.settings import Settings
from tests.cli.commands import environment
from tests.support.journals import only_sqlite

HEAVY = ("sqlalchemy", "pymilvus", "milvus_lite", "openai", "grpc", "numpy", "pydantic", "rich", "connectrpc")


def invoke(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(root, words, env={"MEMSTREAM_TARGET": "127.0.0.1:1", "MEMSTREAM_CONFIG": ""})
    return result.exit_code, result.stdout, result.stderr


def imported(*words: str) -> set[str]:
    """The heavy modules that a command imports."""
    program = (
        "import sys\nfrom memstream_server.cli import main\n"
        f"sys.argv = ['memstream', *{list(words)!r}]\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"print('\\n' + ' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_help_lists_commands_and_imports_nothing_heavy() -> None:
    code, out, _ = invoke("--help")
    assert code == 0
    assert all(f"  {name} " in out for name in COMMANDS)
    assert [f"  {value.value}  " in out for value in Exit] == [True] * len(Exit)
    assert imported("--help") == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help_has_example_and_summary(name: str) -> None:
    command = root.get_command(click.Context(root), name)
    assert command is not None
    assert command.get_short_help_str(200) == COMMANDS[name][1]
    code, out, _ = invoke(name, "--help")
    assert code == 0
    assert "--json" in out or name == "hook"  # whose output is JSON for a host
    assert f"memstream {name}" in out or name == "info"


@pytest.mark.parametrize("name", ["serve", "recall", "backup"])
def test_help_of_a_command_imports_no_store(name: str) -> None:
    assert imported(name, "--help") & {"sqlalchemy", "pymilvus", "milvus_lite", "openai"} == set()


@only_sqlite("its imports are those of the default settings")
def test_serve_imports_no_rich_and_no_http_application(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = f"127.0.0.1:{taken.getsockname()[1]}"  # so serve ends, after all but the announcement
        found = imported("serve", "--data", str(tmp_path), "--listen", "127.0.0.1:0", "--http-listen", used)
    assert found == {"sqlalchemy", "grpc", "numpy", "pydantic"}


def test_serve_has_a_flag_for_every_setting_and_no_other() -> None:
    flags = {option.name for option in serve_command.params} - {"config", "as_json"}
    assert flags == set(Settings.model_fields)
    assert all(option.default is None for option in serve_command.params if option.name in flags)


def test_flag_help_has_meaning_default_and_bounds() -> None:
    _, out, _ = invoke("serve", "--help")
    text = " ".join(out.split())
    assert "observations in one batch. [default: 1024] [1<=x<=100000]" in text
    assert "--data-dir, --data" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--batch-max", "0"], "--batch-max"),
        (["serve", "--listen", "nowhere"], "listen: must be host:port"),
        (["serve", "--milvus-uri", "./milvus.db"], "milvus_uri: must be the URI of a Milvus server"),
        (["serve", "--config", "/nonexistent/memstream.toml"], "there is no settings file"),
        (["serve", "--content-max-bytes", "4000000", "--message-max-bytes", "65536"], "at most half"),
        (["backup", "x", "--config", "/nonexistent/memstream.toml"], "there is no settings file"),
        (["observe", "a/b", "--kind", "sensory"], "require --create"),
        (["observe", "a/b", "--resume"], "--producer"),
        (["recall", "a/b", "q", "--since", "noon"], "is no time: give a date (2026-05-08)"),
        (["list", "a/b", "--time-zone", "Europe/Atlantis"], "give an IANA name"),
        (["recall", "a/b", "q", "--metadata", "page"], "not KEY=VALUE"),
        (["recall", "a/b", "q", "--metadata", "page>=5"], "has an unknown operator"),
        (["list", "a/b", "--metadata", "page==5"], "has an unknown operator"),
        (["erase", "a/b", "--metadata", "page!=5"], "has an unknown operator"),
        (["recall", "a/b", "q", "--limit", "0"], "--limit"),
        (["recall", "a/b", "q", "--limit", "3000000000"], "limit: must be between 0 and 2147483647"),
        (["recall", "a/b", "q", "--alpha", "nan"], "alpha: must be a finite number"),
        (["recall", "a/b", "q", "--timeout", "inf"], "timeout_s: must be a finite number"),
        (["recall", "a/b", "q", "--token", "two words"], "token: must be a string of visible ASCII"),
        (["recall", "a/b c", "q"], "memory: the name of 'a/b c' has ' ' at character 2"),
        (["recall", f"a/{'b' * 129}", "q"], "has 129 characters, at most 128"),
        (["recall", "a/b", "q", "--tls-ca", "/nonexistent"], "--tls-ca: cannot read '/nonexistent': No such file"),
        (["recall", "nomemory", "q"], "namespace/name"),
        (["list", "demo", "--speaker", "Bob"], "name a memory"),
        (["list", "demo", "--label", "team"], "not KEY=VALUE"),
        (["list", "demo", "--label", "a=1", "--label", "a=2"], "names a key twice"),
        (["list", "demo/joy", "--label", "a=1"], "name a namespace"),
        (["list", "--label", "a=1"], "name a namespace"),
        (["show", "a/b", "id", "--external-id", "k"], "not both"),
        (["nosuch"], "No such command"),
        (["recal", "a/b", "q"], "No such command 'recal'. Did you mean 'recall'?"),
        (["info", "--target", "http://127.0.0.1:7700"], "target: 'http://127.0.0.1:7700' is a URL: write host:port"),
        (["info", "--target", ""], "target: is empty"),
        (["observe", "a/b", "/"], "/: Is a directory"),
        (["keys", "create", "two words", "--file", "/nonexistent/keys"], "a key's name is of letters"),
    ],
)
def test_invalid_use_exits_2_and_explains(words: list[str], said: str) -> None:
    code, _, err = invoke(*words)
    assert code == Exit.USAGE
    assert said in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((b"recall", b"demo/joy", b"\xe9t\xe9 \x1b"), r"word 3 of the command line is not UTF-8 from character 1 on"),
        ((b"observe", b"demo/joy", b"caf\xe9.txt"), r"'caf\xe9.txt'"),
        ((b"info", b"--token", b"\xff"), r"word 3"),
        ((b"\xe9",), r"word 1"),
    ],
)
def test_invalid_utf8_argument_exits_2(words: tuple[bytes, ...], said: str) -> None:
    command = [sys.executable.encode(), b"-m", b"memstream_server", *words]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False, env=environment())
    assert (done.returncode, done.stdout) == (Exit.USAGE, b"")
    assert said in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    assert b"\x1b" not in done.stderr


def test_no_server_exits_1_and_says_how_to_start_one() -> None:
    code, out, err = invoke("info")
    assert (code, out) == (Exit.FAILED, "")
    assert err.startswith("memstream: no server answers at 127.0.0.1:1 (Connection refused)")
    assert err.count("\n") == 1


def test_failure_is_json_with_json_flag() -> None:
    code, _, err = invoke("stats", "demo/joy", "--json")
    assert code == Exit.FAILED
    said = json.loads(err)["error"]
    assert said["exit_code"] == 1
    assert "no server answers" in said["message"]


@pytest.mark.parametrize("words", [("recal", "a/b"), ("recall", "a/b"), ("recall", "a/b", "q", "--limit", "0")])
def test_wrong_command_line_is_json_with_json_flag(words: tuple[str, ...]) -> None:
    code, out, err = invoke(*words, "--json")
    error = json.loads(err)["error"]
    assert (code, out, error["exit_code"]) == (Exit.USAGE, "", Exit.USAGE)
    assert error["message"].startswith(("No such command", "Missing argument", "Invalid value for '-n'"))


def test_failure_of_invalid_value_is_json() -> None:
    code, _, err = invoke("recall", "a/b", "q", "--alpha", "nan", "--json")
    error = json.loads(err)["error"]
    assert (code, error["exit_code"]) == (Exit.USAGE, Exit.USAGE)
    assert error["message"].startswith("alpha: must be a finite number")


def test_missing_files_exit_4(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    assert invoke("observe", "a/b", gone)[0] == Exit.NOT_FOUND
    assert invoke("restore", gone, "--data", str(tmp_path / "data"))[0] == Exit.NOT_FOUND
    assert invoke("verify", gone)[0] == Exit.NOT_FOUND
    assert invoke("keys", "list", "--file", gone)[0] == Exit.NOT_FOUND
    assert invoke("keys", "create", "joy", "--file", str(tmp_path / "keys"))[0] == Exit.OK
    assert invoke("keys", "revoke", "0123456789ab", "--file", str(tmp_path / "keys"))[0] == Exit.NOT_FOUND
    code, _, err = invoke("backup", str(tmp_path / "new"), "--data", str(tmp_path))
    assert code == Exit.NOT_FOUND
    assert "there is no journal in" in err
    assert backup_command.name == "backup"


@only_sqlite("the journal is in the directory")
def test_errors_name_the_file_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("I keep bees on the roof\n")
    code, _, err = invoke("restore", str(file), "--data", str(tmp_path / "data"))
    assert (code, f"nothing was restored: {file} is not a journal" in err) == (Exit.FAILED, True), err
    code, _, err = invoke("restore", str(file), "--data", str(file))
    assert (code, f"{file} cannot be a data directory: it is a file" in err) == (Exit.FAILED, True), err


def test_interrupted_command_exits_130_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server_module.Server, "run_with_client", interrupt)
    assert invoke("info") == (Exit.INTERRUPTED, "", "")


def test_erase_without_an_answer_names_the_flag() -> None:
    code, _, err = invoke("erase", "a/b", "01KAB3XJ8Q6C0V7T2N4M5P9RSW")
    assert code == Exit.FAILED
    assert "Permanently erase 1 fragment?" in err
    assert "nothing was erased: answer y, or pass --yes" in err


def test_malformed_file_is_rejected_before_connecting(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n{"txt": "b"}\n')
    code, _, err = invoke("observe", "a/b", str(file))
    assert code == Exit.USAGE
    assert "nothing was sent, because 1 lines" in err
    assert f"{file}:2: 'txt' is not a field" in err


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (errors.MemoryNotFound("there is no memory a/b", reason="MEMORY_NOT_FOUND"), Missing, "--create"),
        (errors.FragmentNotFound("no fragment x"), Missing, "no fragment x"),
        (
            errors.InvalidRequest("bad", violations=(errors.Violation("limit", "too large"),)),
            Misuse,
            "limit: too large",
        ),
        (errors.Unauthenticated("who are you"), Failure, "--token"),
        (errors.Unavailable("last error: [field:lookup: Domain name not found]"), Failure, "(Domain name not found):"),
        (errors.BacklogFull("backlog full", reason="BACKLOG_FULL", retry_after=2.5), Failure, "try again in 2.5 s"),
        (errors.ModelUnavailable("no model", reason="MODEL_UNAVAILABLE"), Failure, "try again"),
        (errors.ServerBehind(5, 9), Failure, "run the same command again"),
        (errors.ProducerSuperseded("superseded"), Failure, "--producer"),
        (errors.ServerDefect("internal error 7f"), Failure, "internal error 7f"),
    ],
)
def test_server_error_gives_advice_in_one_line(error: errors.MemstreamError, kind: type[Failure], said: str) -> None:
    failure = server_module.to_failure(error, "h:1")
    assert type(failure) is kind
    assert said in failure.message
    assert "\n" not in failure.message
    assert failure.reason == error.reason


def test_exit_codes_are_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "cli.md"
    for line in EXIT_CODES.splitlines()[2:]:
        code, meaning = line.split(maxsplit=1)
        assert f"| {code} | {meaning} |" in page.read_text()


def test_page_of_the_command_line_lists_every_command() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text("utf-8")
    cells = [row.split(" | ")[0] for row in page.splitlines() if row.startswith("| `")]
    listed = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    assert set(COMMANDS) <= listed


def test_metadata_value_matches_text_and_parsed_value() -> None:
    assert [(type(each), each) for each in metadata_readings("5")] == [(int, 5), (float, 5.0), (str, "5")]
    assert [(type(each), each) for each in metadata_readings("0.5")] == [(float, 0.5), (str, "0.5")]
    assert [(type(each), each) for each in metadata_readings("true")] == [(bool, True), (str, "true")]
    assert metadata_readings('"5"') == ("5",)
    assert metadata_readings("apollo") == ("apollo",)
    assert metadata_readings("[1]") == ("[1]",)
    assert metadata_readings("null") == ("null",)
