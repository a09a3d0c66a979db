"""The process that runs an operation."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("operations", sa.Column("process", sa.BigInteger()))
