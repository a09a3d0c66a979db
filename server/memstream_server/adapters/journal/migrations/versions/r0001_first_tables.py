"""The tables of the first version."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

BIG_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
NAMED = sa.text("external_id IS NOT NULL")
DUE = sa.text("due_time_us IS NOT NULL")
FORGOTTEN = sa.text("forget_time_us IS NOT NULL")


def upgrade() -> None:
    _create_memory_tables()
    _create_queue_tables()
    _create_indexes()


def _create_memory_tables() -> None:
    op.create_table(
        "anchors",
        sa.Column("memory", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("id", TEXT, primary_key=True),
        sa.Column("vector", sa.LargeBinary()),
        sa.Column("enhancements", sa.LargeBinary(), nullable=False),
    )
    op.create_table(
        "deletions",
        sa.Column("number", BIG_KEY, primary_key=True, autoincrement=False),
        sa.Column("uid", TEXT, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("key", BIG_KEY, primary_key=True, autoincrement=False),
        sa.Column("time_us", sa.BigInteger(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
    )
    op.create_table(
        "fragments",
        sa.Column("key", BIG_KEY, primary_key=True, autoincrement=False),
        sa.Column("memory", sa.BigInteger(), nullable=False),
        sa.Column("id", TEXT, nullable=False),
        sa.Column("tier", TEXT, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("due_time_us", sa.BigInteger()),
        sa.Column("forget_time_us", sa.BigInteger()),
        sa.Column("access_count", sa.BigInteger(), nullable=False),
        sa.Column("access_time_us", sa.BigInteger(), nullable=False),
        sa.Column("session", TEXT, nullable=False),
        sa.Column("speaker", TEXT, nullable=False),
        sa.Column("external_id", TEXT),
        sa.Column("model", TEXT, nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("terms", sa.LargeBinary()),
    )
    op.create_table(
        "memories",
        sa.Column("number", BIG_KEY, primary_key=True, autoincrement=True),
        sa.Column("uid", TEXT, nullable=False, unique=True),
        sa.Column("namespace", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("next_position", sa.BigInteger(), nullable=False),
        sa.Column("reflection_aggregate", sa.Double(), nullable=False),
        sa.Column("create_time_us", sa.BigInteger(), nullable=False),
        sa.Column("update_time_us", sa.BigInteger(), nullable=False),
        sa.Column("seed", sa.LargeBinary(), nullable=False),
        sa.Column("labels", TEXT, nullable=False),
        sa.Column("policy", TEXT, nullable=False),
        sa.UniqueConstraint("namespace", "name", name="memories_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "vectors",
        sa.Column("key", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("model", TEXT, primary_key=True),
        sa.Column("vector", sa.LargeBinary(), nullable=False),
    )


def _create_queue_tables() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", TEXT, primary_key=True),
        sa.Column("memory", sa.BigInteger(), nullable=False),
        sa.Column("type", TEXT, nullable=False),
        sa.Column("payload", TEXT, nullable=False),
        sa.Column("create_time_us", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "meta",
        sa.Column("name", TEXT, primary_key=True),
        sa.Column("value", TEXT, nullable=False),
    )
    op.create_table(
        "observations",
        sa.Column("key", BIG_KEY, primary_key=True, autoincrement=False),
        sa.Column("memory", sa.BigInteger(), nullable=False),
        sa.Column("producer", TEXT, nullable=False),
        sa.Column("first_sequence", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
    )
    op.create_table(
        "outbox",
        sa.Column("id", BIG_KEY, primary_key=True, autoincrement=True),
        sa.Column("memory", TEXT, nullable=False),
        sa.Column("fragment", TEXT, nullable=False),
        sa.Column("deleted", sa.Boolean(), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "producers",
        sa.Column("memory", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("name", TEXT, primary_key=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("received", sa.BigInteger(), nullable=False),
        sa.Column("stored", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "receipts",
        sa.Column("memory", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("producer", TEXT, primary_key=True),
        sa.Column("last_sequence", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("first_sequence", sa.BigInteger(), nullable=False),
        sa.Column("hashes", sa.LargeBinary(), nullable=False),
        sa.Column("rejections", sa.LargeBinary()),
    )
    op.create_table(
        "requests",
        sa.Column("request", TEXT, primary_key=True),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("time_us", sa.BigInteger(), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=False),
    )


def _create_indexes() -> None:
    op.create_index("fragments_id", "fragments", ["id", "memory"], unique=True)
    op.create_index(
        "fragments_external_id",
        "fragments",
        ["memory", "external_id"],
        unique=True,
        sqlite_where=NAMED,
        postgresql_where=NAMED,
    )
    op.create_index("fragments_due", "fragments", ["due_time_us"], sqlite_where=DUE, postgresql_where=DUE)
    op.create_index(
        "fragments_forgotten",
        "fragments",
        ["memory", "forget_time_us"],
        sqlite_where=FORGOTTEN,
        postgresql_where=FORGOTTEN,
    )
    op.create_index("outbox_memory", "outbox", ["memory"])
    op.create_index("requests_time", "requests", ["time_us"])
