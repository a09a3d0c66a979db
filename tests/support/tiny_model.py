"""A sentence-transformers export of six words and three dimensions, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

WORDS = ["[PAD]", "[UNK]", "tea", "coffee", "rain", "memory"]
TABLE = np.array([[9, 9, 9], [0, 0, 1], [1, 0, 0], [0, 1, 0], [-1, 0, 0], [1, 1, 1]], np.float32)
"""A vector a word; the padding's would show."""


def write_model(directory: Path, *inputs: str, table: np.ndarray = TABLE) -> Path:
    """A model that looks words up, and a tokenizer that splits at spaces."""
    import onnx  # here: not every installation has the extra
    from onnx import TensorProto, helper, numpy_helper
    from tokenizers import Tokenizer, models, pre_tokenizers

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
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_padding(length=128)  # as some exports ask for
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 4}))
    return directory
