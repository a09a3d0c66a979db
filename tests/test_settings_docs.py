"""The settings are documented, bounded, read in the documented order, and hide secrets."""

from __future__ import annotations

import inspect
import io
import json
import logging
import re
import urllib.request
from dataclasses import fields
from pathlib import Path

import pytest
import structlog

from memstream_server.app.dependencies import build_limits
from memstream_server.core.policy import DEFAULT, iterate_tunables
from memstream_server.engine.settings import EngineLimits
from memstream_server.observability import Metrics, configure_logging, serve_metrics
from memstream_server.settings import (
    LogFormat,
    LogLevel,
    Settings,
    SettingsError,
    load,
    parse_listen,
    unknown_variables,
)
from scripts.document import GENERATED


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*(f"MEMSTREAM_{field.upper()}" for field in Settings.model_fields), "MEMSTREAM_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == GENERATED[path]()


def test_settings_have_meaning_bounds_and_unit() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        if field.annotation in (int, float):
            assert {type(limit).__name__ for limit in field.metadata} >= {"Ge", "Le"}, name
            assert isinstance(field.json_schema_extra, dict), name
            assert field.json_schema_extra["unit"], name


def test_every_limit_of_the_engine_has_its_setting() -> None:
    """A setting fills the limit of its name: one that is renamed alone would leave the default."""
    other_names = re.findall(r"^        (\w+)=", inspect.getsource(build_limits), re.MULTILINE)
    without = {each.name for each in fields(EngineLimits)} - Settings.model_fields.keys() - set(other_names)
    assert without == {"decide_max", "model_retry_s", "embed_deadline_s"}
    assert build_limits(Settings(memory_blocks_max=7)).memory_blocks_max == 7


def test_policy_fields_have_a_meaning() -> None:
    assert all(meta.get("meaning") for _, _, meta in iterate_tunables(DEFAULT))


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "memstream.toml"
    config.write_text('batch_max = 3\nid_max_chars = 33\nlog_format = "json"\nstreams_max = 5\n')
    monkeypatch.setenv("MEMSTREAM_BATCH_MAX", "2")
    monkeypatch.setenv("MEMSTREAM_ID_MAX_CHARS", "22")
    settings = load(config, {"batch_max": 1, "streams_max": None})
    assert (settings.batch_max, settings.id_max_chars, settings.streams_max) == (1, 22, 5)
    assert settings.log_format is LogFormat.JSON
    assert settings.index_flush_rows == 8_192


def test_environment_can_name_the_settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "memstream.toml"
    config.write_text("batch_max = 7\n")
    monkeypatch.setenv("MEMSTREAM_CONFIG", str(config))
    assert load().batch_max == 7


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("batch_maximum = 3\n", "batch_maximum: there is no such setting"),
        ("batch_max = 0\n", "batch_max: Input should be greater than or equal to 1"),
        ('listen = "7700"\n', "listen: must be host:port"),
        ("batch_max = \n", "Invalid value"),
        ("content_max_bytes = 4000000\nmessage_max_bytes = 65536\n", "at most half of message_max_bytes"),
    ],
)
def test_settings_error_names_the_setting(tmp_path: Path, text: str, complaint: str) -> None:
    config = tmp_path / "memstream.toml"
    config.write_text(text)
    with pytest.raises(SettingsError, match=complaint.replace("(", r"\(")):
        load(config)


@pytest.mark.parametrize("given", ["file", "environment", "flag"])
def test_a_retired_setting_is_refused_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    config = tmp_path / "memstream.toml"
    config.write_text("dense_in_memory_max = 9\n" if given == "file" else "")
    if given == "environment":
        monkeypatch.setenv("MEMSTREAM_DENSE_IN_MEMORY_MAX", "9")
    with pytest.raises(SettingsError, match=r"dense_in_memory_max: .*dense_bytes_max"):
        load(config, {"dense_in_memory_max": 9} if given == "flag" else None)


def test_missing_settings_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"there is no settings file .*absent\.toml"):
        load(tmp_path / "absent.toml")


def test_misspelt_variables_are_reported() -> None:
    names = {"MEMSTREAM_LISTN": "", "MEMSTREAM_LISTEN": "", "MEMSTREAM_CONFIG": "", "PATH": ""}
    assert unknown_variables(names) == ["MEMSTREAM_LISTN"]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:7700", ("127.0.0.1", 7700)),
        ("[::1]:0", ("::1", 0)),
        ("memory.example:65535", ("memory.example", 65535)),
    ],
)
def test_listen_addresses_are_parsed(address: str, expected: tuple[str, int]) -> None:
    assert parse_listen(address) == expected


@pytest.mark.parametrize(
    "address", ["", "7700", ":7700", "host:", "host:65536", "host:-1", "::1:7700", "[nonsense]:1", "host:٣"]
)
def test_invalid_listen_addresses_are_rejected(address: str) -> None:
    with pytest.raises(ValueError, match=r"must be|brackets|does not appear"):
        parse_listen(address)


def test_secrets_are_hidden_in_settings_and_errors(tmp_path: Path) -> None:
    config = tmp_path / "memstream.toml"
    config.write_text('milvus_token = "s3cret"\nembedding_api_key = "s3cret"\n')
    settings = load(config)
    assert settings.milvus_token.get_secret_value() == "s3cret"
    assert "s3cret" not in f"{settings!r}{settings}{settings.model_dump()}"
    config.write_text('milvus_token = ["s3cret"]\n')
    with pytest.raises(SettingsError) as refused:
        load(config)
    assert "s3cret" not in str(refused.value)


@pytest.fixture
def _logging_restored() -> object:
    root = logging.getLogger()
    before = (root.handlers, root.level)
    yield
    root.handlers, level = before
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.usefixtures("_logging_restored")
def test_json_logs_have_one_object_per_line_without_secrets() -> None:
    out = io.StringIO()
    configure_logging(LogLevel.INFO, LogFormat.JSON, out)
    structlog.get_logger().info("started\nforged", milvus_token="s3cret", listen="127.0.0.1:1")
    logging.getLogger("some.library").warning("slow: %s", 3)
    structlog.get_logger().debug("not written")
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["event"], first["milvus_token"], first["level"]) == ("started\\nforged", "**********", "info")
    assert (second["event"], second["logger"], second["level"]) == ("slow: 3", "some.library", "warning")
    assert "s3cret" not in out.getvalue()


@pytest.mark.usefixtures("_logging_restored")
def test_exception_is_logged_with_its_traceback() -> None:
    out = io.StringIO()
    configure_logging(LogLevel.INFO, LogFormat.JSON, out)
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        structlog.get_logger().exception("failed")
    line = json.loads(out.getvalue())
    assert line["event"] == "failed"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("RuntimeError")


def test_metrics_are_served() -> None:
    metrics = Metrics()
    metrics.observations_received.inc(3)
    metrics.transitions.labels(event="promoted").inc()
    endpoint = serve_metrics(metrics, "127.0.0.1:0")
    assert endpoint is not None
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics") as answer:
            text = answer.read().decode()
    finally:
        endpoint.close()
    assert "memstream_observations_received_total 3.0" in text
    assert 'memstream_transitions_total{event="promoted"} 1.0' in text
    assert serve_metrics(metrics, "") is None
