"""Several embedding spaces: an anchor names the space of its vector, and can hold a vector of the next space."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("anchors", sa.Column("model", TEXT, nullable=False, server_default=""))
    op.add_column("anchors", sa.Column("next_model", TEXT))
    op.add_column("anchors", sa.Column("next_vector", sa.LargeBinary()))
    connection = op.get_bind()
    space = connection.execute(sa.text("SELECT value FROM meta WHERE name = 'space'")).scalar_one_or_none()
    if space is not None:  # all existing vectors belong to the only space
        model = json.loads(space)["model"]
        connection.execute(sa.text("UPDATE anchors SET model = :model"), {"model": model})
