"""memstream.local: crashes of the server, settings that differ, and starts that fail."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

import memstream
import memstream.sync
from memstream import local_server
from memstream.local_files import Directory
from tests.local.users import HOLD, finish, holding, kill_server, read_line, script, server_pid
from tests.support.server import ServerProcess


async def test_calls_and_streams_survive_a_killed_server(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with memstream.local(directory, index_flush_interval_s=3.0) as client:
        memory = await client.create_memory("ns/m")
        async with memory.observe(producer="p") as stream:
            await stream.send("the first key is under the mat")
            await stream.flush()
            killed = kill_server(directory)
            with caplog.at_level(logging.WARNING, "memstream.local"):
                stats = await memory.stats()
            assert "has ended" in caplog.text
            assert server_pid(directory) != killed
            await stream.send("the second key is in the shed")
            await stream.flush()
            assert stream.stored == 2
        assert stats.short_term == 1
        kill_server(directory)
        assert len(await memory.recall_once("where is the key?")) == 2
        running = Directory(directory).started_settings(server_pid(directory))
        assert running == {"index_flush_interval_s": "3.0"}


async def test_other_user_may_start_the_server_again(directory: Path) -> None:
    async with memstream.local(directory) as client:
        with holding(directory) as other:
            assert read_line(other) == "ready"
            kill_server(directory)
            assert await client.get_memory("ns/m")
            pid = server_pid(directory)
            finish(other)
        assert server_pid(directory) == pid


async def test_server_that_keeps_crashing_is_an_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "RESTARTS_MAX", 1)
    async with memstream.local(directory) as client:
        kill_server(directory)
        await client.server_info()
        kill_server(directory)
        with pytest.raises(memstream.LocalServerFailed, match="has ended 2 times within 60 s") as raised:
            await client.server_info()
        assert str(directory / "local.log") in str(raised.value)
        assert "memstream listens on" in str(raised.value)
    async with memstream.local(directory) as client:
        assert await client.server_info()


async def test_server_that_somebody_else_ran_is_not_started_again(directory: Path) -> None:
    with ServerProcess(directory) as server:
        async with memstream.local(directory) as client:
            server.kill()
            with pytest.raises(memstream.LocalServerFailed, match="did not start it"):
                await client.server_info()


async def test_other_settings_are_refused_with_both_values(directory: Path) -> None:
    async with memstream.local(directory, index_flush_rows=64, embedding_api_key="sk-one") as client:
        async with memstream.local(directory) as same:
            assert (await same.server_info()).version == (await client.server_info()).version
        for asked, named in (
            ({"recall_limit_max": 7}, "recall_limit_max is not set there, this call asks for 7"),
            ({"index_flush_rows": 9}, "index_flush_rows is 64 there, this call asks for 9"),
            ({"embedding_api_key": "sk-two"}, "embedding_api_key is a hidden value there"),
        ):
            with pytest.raises(memstream.SettingsMismatch, match=named) as raised:
                await memstream.local(directory, **asked)
            assert "sk-" not in str(raised.value)
    assert "sk-" not in (directory / "local.json").read_text("utf-8") + (directory / "local.log").read_text("utf-8")


async def test_settings_of_a_server_of_somebody_else_are_refused(directory: Path) -> None:
    with (
        ServerProcess(directory),
        pytest.raises(memstream.SettingsMismatch, match="was not started by"),
    ):
        await memstream.local(directory, index_flush_rows=64)


async def test_unknown_setting_is_named_with_the_log(directory: Path) -> None:
    with pytest.raises(memstream.LocalServerFailed) as raised:
        await memstream.local(directory, embeding="onnx")
    assert "embeding: there is no such setting" in str(raised.value)
    assert str(directory / "local.log") in str(raised.value)


@pytest.mark.parametrize("name", ["data_dir", "port_file", "users_file", "journal_url"])
def test_settings_that_local_decides_are_refused(directory: Path, name: str) -> None:
    with pytest.raises(memstream.InvalidArgument, match=f"{name}: cannot be set here"):
        memstream.sync.local(directory, **{name: "x"})


async def test_environment_does_not_configure_the_server(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTREAM_EMBEDDING", "no such kind")
    monkeypatch.setenv("MEMSTREAM_CONFIG", "no such file")
    async with memstream.local(directory) as client:
        assert (await client.server_info()).embedding.name == "hashing-1"


def test_start_without_the_server_packages_says_what_to_install(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError('No module named click', name='click')\n", "utf-8")
    with script(HOLD, directory, env=os.environ | {"PYTHONPATH": str(tmp_path)}) as user:
        _, errors = user.communicate(timeout=60)
    assert "LocalServerFailed" in errors
    assert "pip install '.[server]'" in errors


READ_ONLY = """
import os, sys, memstream.local_server, memstream.public, memstream.sync
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
try:
    memstream.sync.local(sys.argv[1])
except memstream.LocalServerFailed as error:
    print(error)
"""


def test_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    sealed = tmp_path / "sealed"
    sealed.mkdir(0o555)
    with script(READ_ONLY, sealed) as process:
        assert finish(process) == f"{sealed} cannot be used as a data directory: Permission denied\n"


async def test_path_that_can_be_no_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    for path, why in (
        (tmp_path / "file", "it is a file"),
        (tmp_path / "file" / "below", "Not a directory"),
        (Path("/proc/memstream"), "No such file or directory"),
    ):
        with pytest.raises(memstream.LocalServerFailed, match=f"cannot be used as a data directory: {why}"):
            await memstream.local(path)


async def test_damaged_directory_quotes_what_the_server_says(directory: Path) -> None:
    async with memstream.local(directory):
        pass
    (directory / "format").write_text("memstream data directory, format 99\n", "utf-8")
    with pytest.raises(memstream.LocalServerFailed, match="has format 99, this server reads up to 1"):
        await memstream.local(directory)
    shutil.rmtree(directory)
