"""An index of the fragments that were written without a vector, which are counted and embedded again."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

UNVECTORED = sa.text("model = ''")


def upgrade() -> None:
    op.create_index(
        "fragments_unvectored",
        "fragments",
        ["memory", "key"],
        sqlite_where=UNVECTORED,
        postgresql_where=UNVECTORED,
    )
