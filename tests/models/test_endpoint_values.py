"""Settings of endpoints: read as documented, and never repeated in an error."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import SecretStr

from memstream_server.cli.group import root
from memstream_server.settings import Settings, SettingsError, load
from memstream_server.settings.values import headers_of, query_of

SECRET = "hunter22-0123456789"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*(f"MEMSTREAM_{field.upper()}" for field in Settings.model_fields), "MEMSTREAM_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "headers"),
    [
        ("", {}),
        (" , ", {}),
        ("api-key=abc", {"api-key": "abc"}),
        ("api-key = abc= , X-Org=7", {"api-key": "abc=", "X-Org": "7"}),
        ("Cookie=a%2Cb%3D1", {"Cookie": "a,b=1"}),
        ("X-Empty=", {"X-Empty": ""}),
    ],
)
def test_headers_are_read(text: str, headers: dict[str, str]) -> None:
    assert headers_of(SecretStr(text)) == headers


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("", {}),
        ("api-version=2024-10-21", {"api-version": "2024-10-21"}),
        ("?a=1&b=%26%3D&c=", {"a": "1", "b": "&=", "c": ""}),
    ],
)
def test_query_is_read(text: str, query: dict[str, str]) -> None:
    assert query_of(SecretStr(text)) == query


@pytest.mark.parametrize("prefix", ["embedding", "next_embedding", "llm"])
@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("headers", SECRET, "header 1 is not name=value"),
        ("headers", f"a=1,{SECRET} x=2", "header 2 is not name=value"),
        ("headers", f"a={SECRET}%0D%0Ab: c", "value of header a is not printable ASCII"),
        ("headers", f"a={SECRET}\u00e9", "value of header a is not printable ASCII"),
        ("headers", f"a={SECRET},A=2", "header A is given twice"),
        ("headers", f"Content-Length={SECRET}", "header Content-Length is set by the server itself"),
        ("query", SECRET, "is not name=value&name=value"),
        ("query", f"a={SECRET}&a=2", "a parameter is given twice"),
        ("base_url", f"ftp://{SECRET}", "must be http://host or https://host"),
        ("base_url", f"{SECRET}.example:8080/v1", "must be http://host or https://host"),
        ("base_url", f"http://{SECRET}:x/v1", "must be http://host or https://host"),
        ("base_url", f"http:///{SECRET}", "must be http://host or https://host"),
        ("base_url", f"http://h/{SECRET}#fragment", "must be http://host or https://host"),
        ("base_url", f"http://h/ {SECRET}", "must be http://host or https://host"),
    ],
)
def test_wrong_value_is_named_and_not_repeated(prefix: str, name: str, value: str, complaint: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load(flags={f"{prefix}_{name}": value})
    assert f"{prefix}_{name}: " in str(raised.value)
    assert complaint in str(raised.value)
    assert SECRET not in str(raised.value)


def test_secrets_are_not_printed(tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(f'llm_headers = "api-key={SECRET}"\nembedding_query = "key={SECRET}"\n')
    assert SECRET in str(tomllib.loads(config.read_text()))
    settings = load(config)
    assert headers_of(settings.llm_headers) == {"api-key": SECRET}
    assert SECRET not in repr(settings)
    assert SECRET not in settings.model_dump_json()


def test_help_shows_no_value_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTREAM_LLM_HEADERS", f"api-key={SECRET}")
    shown = CliRunner().invoke(root, ["serve", "--help"])
    assert shown.exit_code == 0
    assert "--llm-headers" in shown.output
    assert SECRET not in shown.output
