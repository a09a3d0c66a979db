"""Large state documents in parts."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"

IN_PARTS = "parts IS NOT NULL"


def upgrade() -> None:
    op.add_column("states", sa.Column("parts", sa.BigInteger()))
    op.create_index(
        "states_parts", "states", ["parts"], sqlite_where=sa.text(IN_PARTS), postgresql_where=sa.text(IN_PARTS)
    )
