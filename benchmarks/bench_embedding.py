"""Embedding with a local model: texts a second of one core, and the time of a question, in int8 and in float32.

    python benchmarks/bench_embedding.py [--full | --tiny] [--rounds N] [--json FILE]

The model is the installed one (`memstream models install all-minilm-l6-v2`). Without one, it has the same shape and
random weights, which take the same time, and a tokenizer of whole words, which makes fewer tokens. Texts are
140 characters of the letters in examples/data. No server takes part: the figures are of the server's own embedder.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from claims import CPU, Claim, at_least, at_most, make_claim, run_standalone
from report import Report, Size, own_cpu_s, percentile
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from memstream_server.adapters.models.local import store
from memstream_server.adapters.models.local.bert_graph import build_model
from memstream_server.adapters.models.onnx_models import OnnxEmbedder
from memstream_server.settings import Settings

CHARACTERS = 140
TEXTS = {Size.TINY: 4, Size.SHORT: 640, Size.FULL: 3_200}
QUESTIONS = {Size.TINY: 2, Size.SHORT: 100, Size.FULL: 400}
ROUNDS = {Size.TINY: 1, Size.SHORT: 5, Size.FULL: 9}
DATA = Path(__file__).parents[1] / "examples" / "data"
MINILM = {"vocab_size": 30_522, "hidden_size": 384, "intermediate_size": 1_536, "layers": 6, "heads": 12}
TINY = {"vocab_size": 200, "hidden_size": 16, "intermediate_size": 32, "layers": 1, "heads": 2}
POSITIONS = 512
RATE, P50 = "rate texts/s", "p50 ms"
COLUMNS = (RATE, P50, CPU)


def load_texts(count: int) -> list[str]:
    """Pieces of CHARACTERS characters of the letters."""
    lines = (DATA / "tz.jsonl").read_text(encoding="utf-8").splitlines()
    words = " ".join(" ".join(str(json.loads(line)["text"]).split()) for line in lines)
    pieces = [words[start : start + CHARACTERS] for start in range(0, len(words) - CHARACTERS, CHARACTERS)]
    return [pieces[number % len(pieces)] for number in range(count)]


def load_questions(count: int) -> list[str]:
    """Questions about the letters."""
    found = json.loads((DATA / "questions.json").read_text(encoding="utf-8"))
    texts = [str(each["question"]) for each in found]
    return [texts[number % len(texts)] for number in range(count)]


@contextmanager
def model_directories(size: Size) -> Iterator[tuple[Mapping[str, Path], str]]:
    """The model's directory of each precision, and what it is."""
    installed = () if size is Size.TINY else store.list_installed(Settings().models_dir)
    if installed:
        yield {each: installed[0].directory / each for each in store.PRECISIONS}, installed[0].name
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield write_random_model(Path(scratch), TINY if size is Size.TINY else MINILM), "random weights"


def write_random_model(directory: Path, shape: Mapping[str, int]) -> Mapping[str, Path]:
    """Write a model of this shape in each precision; returns the directories."""
    config: dict[str, Any] = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": shape["hidden_size"],
        "num_attention_heads": shape["heads"],
        "num_hidden_layers": shape["layers"],
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": POSITIONS,
    }
    tensors = draw_tensors(shape)
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made = {}
    for precision in store.PRECISIONS:
        made[precision] = directory / precision
        made[precision].mkdir()
        onnx.save(build_model(tensors, config, int8=precision == "int8"), str(made[precision] / "model.onnx"))
        (made[precision] / "config.json").write_text(json.dumps(config), encoding="utf-8")
        tokenizer.save(str(made[precision] / "tokenizer.json"))
    return made


def draw_tensors(shape: Mapping[str, int]) -> dict[str, Any]:
    """Random weights under the names of a published BERT."""
    draw = np.random.default_rng(1).normal
    hidden, middle = shape["hidden_size"], shape["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (shape["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (POSITIONS, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in (f"encoder.layer.{number}" for number in range(shape["layers"])):
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
        attention = [f"{layer}.attention.self.{name}" for name in ("query", "key", "value")]
        for name in (*attention, f"{layer}.attention.output.dense"):
            shapes |= {f"{name}.weight": (hidden, hidden), f"{name}.bias": (hidden,)}
        for name, rows, columns in (("intermediate", middle, hidden), ("output", hidden, middle)):
            shapes |= {f"{layer}.{name}.dense.weight": (rows, columns), f"{layer}.{name}.dense.bias": (rows,)}
    shapes |= {f"{name}.{part}": (hidden,) for name in norms for part in ("weight", "bias")}
    return {name: draw(0, 0.05, each).astype(np.float32) for name, each in shapes.items()}


async def measure_precision(report: Report, name: str, embedder: OnnxEmbedder, size: Size) -> None:
    """One round: all texts in one call, then questions one at a time."""
    texts, questions = load_texts(TEXTS[size]), load_questions(QUESTIONS[size])
    cpu_s = own_cpu_s()
    await embedder.embed(texts)
    used_s = own_cpu_s() - cpu_s
    report.add_round(_texts_row(name), **{RATE: len(texts) / used_s, CPU: used_s / len(texts) * 1e6})
    times_ms, cpu_s = [], own_cpu_s()
    for question in questions:
        began = time.perf_counter()
        await embedder.embed([question])
        times_ms.append((time.perf_counter() - began) * 1e3)
    used_s = own_cpu_s() - cpu_s
    report.add_round(_question_row(name), **{P50: percentile(times_ms, 0.5), CPU: used_s / len(questions) * 1e6})


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """Measure both precisions in every round."""
    with model_directories(size) as (directories, what):
        report.more["model"] = what
        embedders = {name: OnnxEmbedder(directory) for name, directory in directories.items()}
        for _ in range(rounds):
            for name, embedder in embedders.items():
                await measure_precision(report, name, embedder, size)
        for embedder in embedders.values():
            await embedder.close()


def _texts_row(precision: str) -> str:
    return f"{precision}, texts of {CHARACTERS} characters"


def _question_row(precision: str) -> str:
    return f"{precision}, a question alone"


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report(COLUMNS)
    asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about the local embedder."""
    return [
        make_claim(
            report,
            f"local embedding, int8, texts of {CHARACTERS} characters per second of CPU",
            _texts_row("int8"),
            RATE,
            _texts_row("float32"),
            at_least(400, "texts/s"),
        ),
        make_claim(
            report,
            "local embedding, int8, a question alone, p50",
            _question_row("int8"),
            P50,
            _question_row("float32"),
            at_most(5, "ms"),
        ),
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
