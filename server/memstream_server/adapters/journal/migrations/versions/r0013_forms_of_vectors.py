"""Forms of vectors that an older server cannot read (sql/vector_forms.py), and an index of accessed fragments."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    accessed = sa.text("access_count > 0")
    op.create_index(
        "fragments_accessed",
        "fragments",
        ["key", "access_time_us", "access_count"],
        sqlite_where=accessed,
        postgresql_where=accessed,
    )
