"""The bars of the house fail where a figure got worse, and only lower limits are recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts import house


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of limits, with one of files and one of CPU."""
    path = tmp_path / "house.json"
    path.write_text(json.dumps({"server.files": {"limit": 10, "aim": 5}, house.CPU: {"limit": 0.0}}), "utf-8")
    monkeypatch.setattr(house, "RECORDS", path)
    return path


def test_figure_over_its_limit_is_named(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert house.report_worse({"server.files": 11}, json.loads(records.read_text("utf-8")))
    assert "server.files is 11, the limit is 10" in capsys.readouterr().err


def test_figure_at_its_limit_passes(records: Path) -> None:
    assert not house.report_worse({"server.files": 10}, json.loads(records.read_text("utf-8")))


def test_calls_have_room_for_background_work() -> None:
    assert not house.is_worse("way.recall.calls", 1050, 1000)
    assert house.is_worse("way.recall.calls", 1051, 1000)


def test_recording_lowers_limits_and_raises_none(records: Path) -> None:
    house.lower_limits({"server.files": 12}, json.loads(records.read_text("utf-8")))
    assert json.loads(records.read_text("utf-8"))["server.files"] == {"limit": 10, "aim": 5}
    house.lower_limits({"server.files": 8, "server.lines": 7}, json.loads(records.read_text("utf-8")))
    written = json.loads(records.read_text("utf-8"))
    assert written["server.files"] == {"limit": 8, "aim": 5}
    assert written["server.lines"] == {"limit": 7}


def test_cpu_of_a_command_over_its_limit_fails(records: Path) -> None:
    work = [sys.executable, "-c", "sum(range(60_000_000))"]
    assert house.run_measured(work, json.loads(records.read_text("utf-8"))) == 1
    assert house.run_measured([sys.executable, "-c", "raise SystemExit(3)"], {house.CPU: {"limit": 60}}) == 3


def test_cpu_counts_by_the_speed_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, work = {house.CPU: {"limit": 0.0, "aim": 0.0}}, [sys.executable, "-c", "sum(range(60_000_000))"]
    assert house.run_measured(work, limits) == 1
    monkeypatch.setattr(house, "time_loop", lambda: 1e6 * house.LOOP_S)
    assert house.run_measured(work, limits) == 0


def test_typescript_imports_of_types_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.ts").write_text('import { b } from "./b.js";\nimport type {\n  C,\n} from "./c.js";\n', "utf-8")
    (tmp_path / "b.ts").write_text('import { x } from "elsewhere";\n', "utf-8")
    (tmp_path / "c.ts").write_text('export type { A } from "./a.js";\n', "utf-8")
    monkeypatch.setattr(house, "TYPESCRIPT", tmp_path)
    assert house.import_circles(house.typescript_imports()) == [[str(tmp_path / "a.ts"), str(tmp_path / "c.ts")]]


def test_every_recorded_figure_is_measured_and_has_a_limit() -> None:
    records = json.loads(house.RECORDS.read_text("utf-8"))
    assert all(records[name]["limit"] >= 0 for name in records)
    assert dict(house.measure_files()).keys() == {
        name for name in records if not name.startswith(("way.", "rest.", "test."))
    }
