"""A journal by URL, without a database: rejected values, their error texts, and hidden passwords."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from click.testing import CliRunner

from memstream_server.adapters.journal.database import postgres
from memstream_server.cli.group import root
from memstream_server.ports.journal.errors import Unreadable
from memstream_server.settings import Settings, SettingsError, load

SECRET = "postgresql://joy:s3cret@db.example/memstream"


def test_setting_rejects_other_url_schemes() -> None:
    with pytest.raises(SettingsError, match=r"journal_url: .*must begin with postgresql://") as caught:
        load(None, {"journal_url": "mysql://joy:s3cret@db.example/memstream"})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("url", [SECRET, SECRET.replace("postgresql", "postgres")])
def test_settings_hide_url_password(url: str) -> None:
    settings = load(None, {"journal_url": url})
    assert settings.journal_url.get_secret_value() == url
    assert "s3cret" not in f"{settings!r} {settings}"
    assert Settings.model_fields["journal_url"].default.get_secret_value() == ""


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_every_postgresql_scheme_uses_psycopg(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "psycopg")
    url = postgres.parse_url(SECRET.replace("postgresql", scheme))
    assert (url.drivername, url.password, url.database) == ("postgresql+psycopg", "s3cret", "memstream")
    assert "s3cret" not in str(url)


def test_missing_psycopg_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unreadable, match=r"pip install '.\[server,postgres\]'"):
        postgres.parse_url(SECRET)


@pytest.mark.parametrize("command", [["backup", "copy"], ["restore", "copy"]])
def test_backup_and_restore_point_to_pg_dump(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copy").touch()
    answer = CliRunner().invoke(root, command, env={"MEMSTREAM_JOURNAL_URL": SECRET})
    assert answer.exit_code != 0
    assert "pg_dump" in answer.output
    assert "s3cret" not in answer.output
