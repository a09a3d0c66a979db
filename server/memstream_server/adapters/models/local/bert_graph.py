"""Builds the ONNX file of a BERT encoder from its published weights, in float32 or int8, without torch.

The weights are read by the names that their authors gave them, from safetensors or an ONNX export.

The graph has the inputs of an official export (`input_ids`, `attention_mask`, `token_type_ids`, each (texts, tokens))
and its output `last_hidden_state` (texts, tokens, dimension).

int8: each matrix has one scale per output column, and its inputs are quantized as they come (ONNX's
DynamicQuantizeLinear and MatMulInteger, which onnxruntime fuses into one operator); each row of the word table has a
scale of its own. Attention, normalization and the small tables remain float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Tensors = Mapping[str, npt.NDArray[Any]]
_TYPES = {"F32": "<f4", "F16": "<f2", "I64": "<i8"}
_NAMED = ("embeddings.", "encoder.")
_INT8_MAX = 127
_FACTOR_MAX = 63
"""Of a matrix: processors without VNNI add two products of input and weight in 16 bits. 2 * 255 * 63 fits; larger sums
saturate, and give other vectors than on other processors."""


class UnknownArchitecture(ValueError):
    """The configuration or the weights are not those of a BERT encoder that this module can build."""


def read_weights(file: Path) -> Tensors:
    """The tensors of a file in either format, by its suffix. Raises UnknownArchitecture."""
    return read_onnx(file) if file.suffix == ".onnx" else read_safetensors(file)


def read_safetensors(file: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a safetensors file. Raises UnknownArchitecture for a malformed file."""
    data = np.memmap(file, np.uint8, "r")
    try:
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        if start > len(data):
            raise ValueError("its header is cut")
        header = json.loads(data[8:start].tobytes())
        tensors = {}
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                tensors[name] = data[start + first : start + last].view(_TYPES[entry["dtype"]]).reshape(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnknownArchitecture(f"{file.name} is no safetensors file of known types: {error}") from error
    return tensors


def read_onnx(file: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors of an encoder that torch exported. Raises UnknownArchitecture for a malformed file.

    The export keeps the names of all tensors but the matrices: it transposes them, and names them by numbers. A matrix
    gets its name back from the bias that is added to its product.
    """
    try:
        graph = onnx.load(str(file)).graph
        values = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    except Exception as error:  # protobuf's own exception, and onnx's of several kinds, have no common base
        raise UnknownArchitecture(f"{file.name} is no ONNX file that can be read: {str(error)[:300]}") from error
    tensors = {name: value for name, value in values.items() if name.startswith(_NAMED)}
    matrices = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    for node in graph.node:
        if node.op_type == "Add":
            for bias, product in (node.input, reversed(node.input)):
                if bias in tensors and (matrix := matrices.get(product)) in values:
                    tensors[f"{bias.removesuffix('bias')}weight"] = values[matrix].T
    return tensors


OPSET = 20
"""The first with Gelu."""
_IR_VERSION = 9
_MASKED = -10_000.0
"""Added to the attention to padding, as in BERT's own code."""


def build_model(tensors: Tensors, config: Mapping[str, Any], *, int8: bool) -> onnx.ModelProto:
    """The ONNX model of these weights. Raises UnknownArchitecture."""
    if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu":
        raise UnknownArchitecture("config.json is not of a BERT encoder with GELU")
    try:
        return _Graph(tensors, config, int8).build()
    except KeyError as error:
        raise UnknownArchitecture(f"the weights or config.json lack {error}") from error


class _Graph:
    """Nodes and constants of one model. A method adds an operation and returns the name of its output."""

    def __init__(self, tensors: Tensors, config: Mapping[str, Any], int8: bool) -> None:
        self._tensors = tensors
        self._hidden = int(config["hidden_size"])
        self._heads = int(config["num_attention_heads"])
        self._layers = int(config["num_hidden_layers"])
        self._epsilon = float(config["layer_norm_eps"])
        self._int8 = int8
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def build(self) -> onnx.ModelProto:
        hidden = self._embed()
        penalty = self._penalize_padding()
        for number in range(self._layers):
            hidden = self._encode(hidden, penalty, f"encoder.layer.{number}")
        self._add("Identity", [hidden], "last_hidden_state")
        names = ("input_ids", "attention_mask", "token_type_ids")
        inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["texts", "tokens"]) for name in names]
        shape: list[str | int | None] = ["texts", "tokens", self._hidden]
        output = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, shape)
        graph = helper.make_graph(self._nodes, "bert", inputs, [output], list(self._constants.values()))
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="memstream")

    def _embed(self) -> str:
        """The sum of word, position and type vectors, normalized."""
        words = self._look_up_words()
        table = self._constant("types", self._tensors["embeddings.token_type_embeddings.weight"])
        types = self._add("Gather", [table, "token_type_ids"], "type_vectors")
        length = self._add("Shape", ["input_ids"], "length", start=1, end=2)
        first = self._constant("first", np.array([0], np.int64))
        table = self._constant("positions", self._tensors["embeddings.position_embeddings.weight"])
        positions = self._add("Slice", [table, first, length, first], "position_vectors")
        typed = self._add("Add", [words, types], "typed_vectors")
        placed = self._add("Add", [typed, positions], "placed_vectors")
        return self._normalize(placed, "embeddings.LayerNorm")

    def _look_up_words(self) -> str:
        table = np.asarray(self._tensors["embeddings.word_embeddings.weight"], np.float32)
        if not self._int8:
            return self._add("Gather", [self._constant("words", table), "input_ids"], "word_vectors")
        integers, scales = _quantize(table, 1, _INT8_MAX)
        words = self._constant("words", integers)
        found = self._add("Gather", [words, "input_ids"], "word_integers")
        wide = self._add("Cast", [found], "word_numbers", to=TensorProto.FLOAT)
        scale = self._add("Gather", [self._constant("word_scales", scales), "input_ids"], "word_scale")
        return self._add("Mul", [wide, scale], "word_vectors")

    def _penalize_padding(self) -> str:
        """(texts, 1, 1, tokens): what is added to the attention to each token."""
        mask = self._add("Cast", ["attention_mask"], "mask", to=TensorProto.FLOAT)
        absent = self._add("Sub", [self._constant("one", np.float32(1)), mask], "absent")
        penalty = self._add("Mul", [absent, self._constant("masked", np.float32(_MASKED))], "penalty")
        return self._add("Unsqueeze", [penalty, self._constant("axes", np.array([1, 2], np.int64))], "penalties")

    def _encode(self, hidden: str, penalty: str, layer: str) -> str:
        """One layer: attention and feed-forward, each with its residual and normalization."""
        context = self._attend(hidden, penalty, f"{layer}.attention.self")
        attended = self._project(context, f"{layer}.attention.output.dense")
        summed = self._add("Add", [attended, hidden], f"{layer}.attention.sum")
        middle = self._normalize(summed, f"{layer}.attention.output.LayerNorm")
        wide = self._project(middle, f"{layer}.intermediate.dense")
        active = self._add("Gelu", [wide], f"{layer}.gelu")
        narrow = self._project(active, f"{layer}.output.dense")
        summed = self._add("Add", [narrow, middle], f"{layer}.sum")
        return self._normalize(summed, f"{layer}.output.LayerNorm")

    def _attend(self, hidden: str, penalty: str, name: str) -> str:
        parts = ("query", "key", "value")
        weight = np.concatenate([self._tensors[f"{name}.{part}.weight"].T for part in parts], axis=1)
        bias = np.concatenate([self._tensors[f"{name}.{part}.bias"] for part in parts])
        together = self._multiply(hidden, weight, bias, f"{name}.qkv")
        outputs = [f"{name}.{part}" for part in parts]
        self._nodes.append(helper.make_node("Split", [together], outputs, axis=2, num_outputs=3))
        width = self._hidden // self._heads
        heads = self._constant("heads", np.array([0, 0, self._heads, width], np.int64))
        turned = {}
        for part, order in zip(parts, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True):
            split = self._add("Reshape", [f"{name}.{part}", heads], f"{name}.{part}.heads")
            turned[part] = self._add("Transpose", [split], f"{name}.{part}.turned", perm=order)
        scores = self._add("MatMul", [turned["query"], turned["key"]], f"{name}.scores")
        scale = self._constant("attention_scale", np.float32(width**-0.5))
        scaled = self._add("Mul", [scores, scale], f"{name}.scaled")
        masked = self._add("Add", [scaled, penalty], f"{name}.masked")
        shares = self._add("Softmax", [masked], f"{name}.shares", axis=-1)
        mixed = self._add("MatMul", [shares, turned["value"]], f"{name}.mixed")
        turned_back = self._add("Transpose", [mixed], f"{name}.mixed.turned", perm=[0, 2, 1, 3])
        flat = self._constant("flat", np.array([0, 0, self._hidden], np.int64))
        return self._add("Reshape", [turned_back, flat], f"{name}.context")

    def _normalize(self, value: str, name: str) -> str:
        scale = self._constant(f"{name}.weight", self._tensors[f"{name}.weight"])
        bias = self._constant(f"{name}.bias", self._tensors[f"{name}.bias"])
        return self._add("LayerNormalization", [value, scale, bias], name, epsilon=self._epsilon, axis=-1)

    def _project(self, value: str, name: str) -> str:
        return self._multiply(value, self._tensors[f"{name}.weight"].T, self._tensors[f"{name}.bias"], name)

    def _multiply(self, value: str, weight: npt.NDArray[Any], bias: npt.NDArray[Any], name: str) -> str:
        """value x weight + bias."""
        weight = np.asarray(weight, np.float32)
        product = f"{name}.product"
        if self._int8:
            self._multiply_int8(value, weight, name, product)
        else:
            self._add("MatMul", [value, self._constant(f"{name}.weight", weight)], product)
        return self._add("Add", [product, self._constant(f"{name}.bias", bias)], name)

    def _multiply_int8(self, value: str, weight: npt.NDArray[np.float32], name: str, product: str) -> None:
        quantized, scales = _quantize(weight, 0, _FACTOR_MAX)
        integers = self._constant(f"{name}.weight", quantized)
        zeros = self._constant(f"{name}.zeros", np.zeros(weight.shape[1], np.int8))
        column = self._constant(f"{name}.scales", scales[0])
        given = [f"{name}.input", f"{name}.input.scale", f"{name}.input.zero"]
        self._nodes.append(helper.make_node("DynamicQuantizeLinear", [value], given))
        total = self._add("MatMulInteger", [given[0], integers, given[2], zeros], f"{name}.total")
        wide = self._add("Cast", [total], f"{name}.wide", to=TensorProto.FLOAT)
        scale = self._add("Mul", [given[1], column], f"{name}.scale")
        self._add("Mul", [wide, scale], product)

    def _add(self, operation: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self._nodes.append(helper.make_node(operation, inputs, [output], **attributes))
        return output

    def _constant(self, name: str, value: npt.NDArray[Any] | np.float32) -> str:
        label = f"constant.{name}"
        if label not in self._constants:
            array = np.asarray(value)
            kept = array if array.dtype in (np.int8, np.int64) else array.astype(np.float32)
            self._constants[label] = numpy_helper.from_array(np.ascontiguousarray(kept).reshape(kept.shape), label)
        return label


def _quantize(
    values: npt.NDArray[np.float32], axis: int, most: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """(integers, the step of each row or column, so that its largest value becomes `most`)."""
    largest = np.abs(values).max(axis=axis, keepdims=True)
    scales: npt.NDArray[np.float32] = np.where(largest > 0, largest / most, 1).astype(np.float32)
    return np.clip(np.rint(values / scales), -most, most).astype(np.int8), scales
