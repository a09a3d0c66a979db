"""Producers that represent a request_id are deleted with it; existing ones cannot be distinguished and stay."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

OF_ONE_CALL = sa.text("create_time_us IS NOT NULL")


def upgrade() -> None:
    op.add_column("producers", sa.Column("create_time_us", sa.BigInteger()))
    op.create_index(
        "producers_of_one_call",
        "producers",
        ["create_time_us"],
        sqlite_where=OF_ONE_CALL,
        postgresql_where=OF_ONE_CALL,
    )
