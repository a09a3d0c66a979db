"""Counts in the row of a memory: its fragments that are not forgotten, and the time of its last commit."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"

_COUNTED = sa.text(
    "SELECT memory, count(*) - count(forget_time_us) AS present FROM fragments GROUP BY memory ORDER BY memory"
)
_SET = sa.text("UPDATE memories SET fragments = :present WHERE number = :number")
_CHANGED = sa.text(
    "UPDATE memories SET change_time_us = coalesce((SELECT time_us FROM events"
    " WHERE events.key = memories.number * 4294967296 + memories.revision), update_time_us)"
)


def upgrade() -> None:
    for name in ("fragments", "change_time_us"):
        op.add_column("memories", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    connection = op.get_bind()
    counted = [{"number": number, "present": present} for number, present in connection.execute(_COUNTED)]
    if counted:
        connection.execute(_SET, counted)
    connection.execute(_CHANGED)
