"""Reads the directory of a sentence-transformers model exported to ONNX: session, tokenizer, input limit.

Files: `model.onnx` (there or in `onnx/`), `tokenizer.json`, `config.json`, and optionally `sentence_bert_config.json`
(the input limit), `1_Pooling/config.json` (mean, or the first token) and `memstream.json` (the model and the name of
the space, for a model that `memstream models install` built).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Inputs = dict[str, npt.NDArray[np.int64]]
TOKENS_MAX = 512
"""Input limit if the directory specifies none."""
MEMSTREAM = "memstream.json"
POOLING_DIR = "1_Pooling"
POOLING_KEYS = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}
"""The keys of 1_Pooling/config.json for the kinds of pooling that the embedder knows."""
_KNOWN = ("input_ids", "attention_mask", "token_type_ids")
_SLOW_OPTIMIZERS = ["SkipLayerNormFusion"]
"""Optimizers of onnxruntime that make a model slower. This one's operator takes several times as long as the addition
and the normalization that it replaces: MiniLM in int8 embeds 330 texts/s with it, 400 without it."""


class OnnxModelError(ValueError):
    """The directory has no usable model; the text says why. The operator must correct it."""


def model_file(directory: Path) -> Path:
    """The path of the exported model. Raises OnnxModelError if there is none."""
    for file in (directory / "model.onnx", directory / "onnx/model.onnx"):
        if file.is_file():
            return file
    message = f"{directory} has no model.onnx, nor has its folder onnx"
    if folders := sorted(file.parent.name for file in directory.glob("*/model.onnx")):  # of an installed model
        message += f"; name one of its folders instead: {', '.join(str(directory / name) for name in folders)}"
    raise OnnxModelError(message)


def model_name(directory: Path, file: Path) -> str:
    """The directory's name and a hash of the weights, so that other weights are another model.

    A model that memstream built has its name in `memstream.json`, with the hash of the published weights: versions of
    onnx may write the same model in other bytes.
    """
    built = read_json(directory / MEMSTREAM).get("space")
    if isinstance(built, str) and built:
        return built
    with file.open("rb") as model:
        digest = hashlib.file_digest(model, lambda: hashlib.blake2b(digest_size=4)).hexdigest()
    return f"{directory.resolve().name}@{digest}"


def known_model(directory: Path) -> str:
    """The name in the table of `memstream models`, for a model that memstream built; else empty."""
    return str(read_json(directory / MEMSTREAM).get("model", ""))


def pooling(directory: Path) -> str:
    """A key of POOLING_KEYS; mean if the directory specifies none. Raises OnnxModelError for another, or several."""
    found = read_json(directory / POOLING_DIR / "config.json")
    asked = {key for key, value in found.items() if key.startswith("pooling_mode_") and value is True}
    kinds = [kind for kind, key in POOLING_KEYS.items() if asked == {key}]
    if found and not kinds:
        raise OnnxModelError(f"{directory} is a model of another pooling than {' or '.join(POOLING_KEYS)}")
    return kinds[0] if kinds else "mean"


def session(file: Path) -> Any:
    """An onnxruntime session with one thread that does not spin. On a busy server, two spinning threads take 230 ms a
    sentence instead of 18. Raises OnnxModelError.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise OnnxModelError("onnxruntime is not installed: pip install '.[server,onnx]'") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        made = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=_SLOW_OPTIMIZERS
        )
    except Exception as error:  # the runtime's own exceptions have no public base
        raise OnnxModelError(f"{file} cannot be loaded: {str(error)[:300]}") from error
    unknown = sorted({each.name for each in made.get_inputs()} - set(_KNOWN))
    if unknown:
        raise OnnxModelError(f"{file} asks for {', '.join(unknown)}; it is no export of a sentence model")
    return made


def tokenizer(directory: Path, tokens_max: int) -> Any:
    """The directory's tokenizer, truncating at `tokens_max` and padding to the longest. Raises OnnxModelError."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise OnnxModelError("tokenizers is not installed: pip install '.[server,onnx]'") from error
    file = directory / "tokenizer.json"
    try:
        made = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise OnnxModelError(f"{file} cannot be loaded: {str(error)[:300]}") from error
    padding = made.padding or {}
    made.enable_truncation(tokens_max)
    # Override a fixed padding length in the file, with which every short text would cost as much as the longest.
    made.enable_padding(pad_id=padding.get("pad_id", 0), pad_token=padding.get("pad_token", "[PAD]"))
    return made


def load_counters(directory: Path) -> dict[str, Callable[[str], int]]:
    """Functions that count the tokens of a text, by name: one for each NAME.json of the directory. Raises
    OnnxModelError."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise OnnxModelError("tokenizers is not installed: pip install '.[server,onnx]'") from error

    def load(file: Path) -> Callable[[str], int]:
        try:
            made = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise OnnxModelError(f"{file} cannot be loaded: {str(error)[:300]}") from error
        made.no_truncation()
        made.no_padding()
        return lambda text: len(made.encode(text, add_special_tokens=False).ids)

    files = sorted(directory.glob("*.json"))
    if not files:
        raise OnnxModelError(f"{directory} has no tokenizer: NAME.json")
    return {file.stem: load(file) for file in files}


def inputs(encoded: Sequence[Any]) -> Inputs:
    """The possible model inputs of a batch of encodings, each (texts, tokens)."""
    columns = ([each.ids for each in encoded], [each.attention_mask for each in encoded])
    types = [each.type_ids for each in encoded]
    return {name: np.array(rows, np.int64) for name, rows in zip(_KNOWN, (*columns, types), strict=True)}


def tokens_max(directory: Path) -> int:
    """The input limit in tokens: what the model was trained for and accepts. Raises OnnxModelError."""
    asked = read_json(directory / "sentence_bert_config.json").get("max_seq_length")
    possible = read_json(directory / "config.json").get("max_position_embeddings")
    limits = [limit for limit in (asked, possible) if isinstance(limit, int) and limit > 0]
    return min(limits, default=TOKENS_MAX)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist. Raises OnnxModelError."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OnnxModelError(f"{file} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
