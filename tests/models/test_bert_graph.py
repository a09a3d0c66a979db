"""The ONNX graph of a BERT encoder, compared with the same encoder in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.support.tiny_bert import CONFIGURATION, encode, make_tensors, write_onnx, write_safetensors

onnx = pytest.importorskip("onnx", reason="the extra models is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra models is not installed")

from memstream_server.adapters.models.local.bert_graph import (  # noqa: E402  # imports onnx
    UnknownArchitecture,
    build_model,
    read_weights,
)

Write = Callable[[Path, Mapping[str, np.ndarray]], None]
IDS = np.array([[2, 3, 4, 5, 6], [7, 8, 0, 0, 0], [3, 3, 3, 9, 0]], np.int64)
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]], np.int64)


def run(model: object) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString())  # type: ignore[attr-defined]
    given = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": np.zeros_like(IDS)}
    (found,) = session.run(None, given)
    return np.asarray(found)


def test_float32_model_equals_numpy_encoder() -> None:
    tensors = make_tensors()
    model = build_model(tensors, CONFIGURATION, int8=False)
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_allclose(run(model)[MASK == 1], encode(tensors, IDS, MASK)[MASK == 1], atol=2e-5)


def test_int8_model_is_near_numpy_encoder() -> None:
    tensors = make_tensors()
    model = build_model(tensors, CONFIGURATION, int8=True)
    onnx.checker.check_model(model, full_check=True)
    found, exact = run(model)[MASK == 1], encode(tensors, IDS, MASK)[MASK == 1]
    cosines = (found * exact).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(exact, axis=1)
    assert cosines.min() > 0.99
    assert np.abs(found - exact).max() > 1e-4, "it is not the float32 model"


def test_same_weights_give_the_same_bytes() -> None:
    for int8 in (False, True):
        one, same = (build_model(make_tensors(), CONFIGURATION, int8=int8).SerializeToString() for _ in range(2))
        assert one == same


def test_column_of_zeros_can_be_quantized() -> None:
    tensors = make_tensors()
    tensors["encoder.layer.0.intermediate.dense.weight"][3] = 0
    tensors["embeddings.word_embeddings.weight"][0] = 0
    assert np.isfinite(run(build_model(tensors, CONFIGURATION, int8=True))).all()


@pytest.mark.parametrize(("write", "name"), [(write_safetensors, "model.safetensors"), (write_onnx, "model.onnx")])
def test_weights_are_read_as_written(tmp_path: Path, write: Write, name: str) -> None:
    tensors = make_tensors()
    write(tmp_path / name, tensors)
    found = read_weights(tmp_path / name)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor)


@pytest.mark.parametrize(
    "data", [b"12345678", (10**6).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"]
)
def test_malformed_safetensors_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "weights").write_bytes(data)
    with pytest.raises(UnknownArchitecture, match="no safetensors file"):
        read_weights(tmp_path / "weights")


def test_a_malformed_onnx_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.onnx").write_bytes(b"no model")
    with pytest.raises(UnknownArchitecture, match="no ONNX file"):
        read_weights(tmp_path / "weights.onnx")


def test_other_architectures_are_refused() -> None:
    with pytest.raises(UnknownArchitecture, match="not of a BERT encoder"):
        build_model(make_tensors(), CONFIGURATION | {"model_type": "mpnet"}, int8=True)
    tensors = make_tensors()
    del tensors["encoder.layer.1.output.dense.bias"]
    with pytest.raises(UnknownArchitecture, match=r"lack 'encoder\.layer\.1\.output\.dense\.bias'"):
        build_model(tensors, CONFIGURATION, int8=False)
