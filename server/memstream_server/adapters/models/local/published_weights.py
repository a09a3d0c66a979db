"""Reads a BERT's published weights, by the names that its authors gave them, from safetensors or an ONNX export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

Tensors = Mapping[str, npt.NDArray[Any]]
_TYPES = {"F32": "<f4", "F16": "<f2", "I64": "<i8"}
_NAMED = ("embeddings.", "encoder.")


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
