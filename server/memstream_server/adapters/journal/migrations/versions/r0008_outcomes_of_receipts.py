"""Receipts keep the outcomes of their observations; a request_id is no longer a producer."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

FINISHED = "FROM producers WHERE create_time_us IS NOT NULL AND stored = received"


def upgrade() -> None:
    op.add_column("receipts", sa.Column("outcomes", sa.LargeBinary()))
    op.execute(f"DELETE FROM receipts WHERE (memory, producer) IN (SELECT memory, name {FINISHED})")
    op.execute(f"DELETE {FINISHED}")
    op.drop_index("producers_of_one_call", "producers")
    op.drop_column("producers", "create_time_us")
