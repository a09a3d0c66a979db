"""Memories by label: a row for each label of a memory."""

from hashlib import blake2b

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    made = op.create_table(
        "memory_labels",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("label", sa.LargeBinary(), primary_key=True),
        sa.Column("name", TEXT, primary_key=True),
        sa.Column("memory", sa.BigInteger(), nullable=False),
    )
    op.create_index("memory_labels_memory", "memory_labels", ["memory"])
    found = op.get_bind().execute(sa.text("SELECT number, namespace, name, labels FROM memories WHERE labels <> '[]'"))
    rows = [
        {"namespace": namespace, "label": _hash_label(label), "name": name, "memory": number}
        for number, namespace, name, labels in found
        for label in msgspec.json.decode(labels)
    ]
    if rows:
        op.bulk_insert(made, rows)


def _hash_label(pair: list[str]) -> bytes:
    """As codec.py hashes it."""
    return blake2b(msgspec.json.encode(pair), digest_size=16).digest()
