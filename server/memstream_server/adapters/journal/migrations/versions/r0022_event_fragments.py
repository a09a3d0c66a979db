"""The revisions of the log that name a fragment. Those of older events are entered slice by slice afterwards."""

import sqlalchemy as sa
from alembic import op

from memstream_server.adapters.journal.database.migrate import UNENTERED

revision = "0022"
down_revision = "0021"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "event_fragments",
        sa.Column("memory", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("fragment", TEXT, primary_key=True),
        sa.Column("revision", sa.BigInteger(), primary_key=True, autoincrement=False),
        sqlite_with_rowid=False,
    )
    mark = {"name": UNENTERED, "value": "0"}
    op.get_bind().execute(sa.text("INSERT INTO meta (name, value) VALUES (:name, :value)"), mark)
