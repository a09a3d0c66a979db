"""Generated model exports with six words and three dimensions: a sentence-transformers model and a cross-encoder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

WORDS = ["[PAD]", "[UNK]", "tea", "coffee", "rain", "memory"]
TABLE = np.array([[9, 9, 9], [0, 0, 1], [1, 0, 0], [0, 1, 0], [-1, 0, 0], [1, 1, 1]], np.float32)
"""One vector per word; the padding's would visibly change a result."""


def write_model(directory: Path, *inputs: str, table: np.ndarray = TABLE) -> Path:
    """Write a model that looks up words, and a tokenizer that splits at spaces."""
    import onnx  # imported here, because not every installation has the extra
    from onnx import TensorProto, helper, numpy_helper

    directory.mkdir(parents=True, exist_ok=True)
    given = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["texts", "tokens"])
        for name in inputs or ("input_ids", "attention_mask")
    ]
    out = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["texts", "tokens", table.shape[1]])
    look_up = helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"])
    graph = helper.make_graph([look_up], "tiny", given, [out], [numpy_helper.from_array(table, "table")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(directory / "model.onnx"))
    _write_tokenizer(directory, 4)
    return directory


def write_cross_encoder(directory: Path, outputs: int = 1) -> Path:
    """Write a model with `outputs` equal logits: the inner product of both sides' vector sums, minus 0.5."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    directory.mkdir(parents=True, exist_ok=True)
    names = ("input_ids", "attention_mask", "token_type_ids")
    given = [helper.make_tensor_value_info(name, TensorProto.INT64, ["pairs", "tokens"]) for name in names]
    out = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["pairs", outputs])
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["words"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["token_type_ids"], ["type"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["mask", "type"], ["second"]),
        helper.make_node("Sub", ["mask", "second"], ["first"]),
    ]
    for side in ("first", "second"):
        nodes += [
            helper.make_node("Unsqueeze", [side, "last"], [f"{side}_column"]),
            helper.make_node("Mul", ["words", f"{side}_column"], [f"{side}_words"]),
            helper.make_node("ReduceSum", [f"{side}_words", "tokens"], [f"{side}_sum"], keepdims=0),
        ]
    nodes += [
        helper.make_node("Mul", ["first_sum", "second_sum"], ["products"]),
        helper.make_node("ReduceSum", ["products", "tokens"], ["product"], keepdims=1),
        helper.make_node("Sub", ["product", "halves"], ["logits"]),
    ]
    constants = {
        "table": TABLE,
        "last": np.array([2], np.int64),
        "tokens": np.array([1], np.int64),
        "halves": np.full(outputs, 0.5, np.float32),
    }
    held = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "tiny", given, [out], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(directory / "model.onnx"))
    _write_tokenizer(directory, 8)
    return directory


def _write_tokenizer(directory: Path, tokens_max: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_padding(length=128)  # as in some real exports
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": tokens_max}))
