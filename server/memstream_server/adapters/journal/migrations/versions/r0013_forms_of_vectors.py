"""Forms of vectors that an older server cannot read; the tables stay as they are (sql/vector_forms.py)."""

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass
