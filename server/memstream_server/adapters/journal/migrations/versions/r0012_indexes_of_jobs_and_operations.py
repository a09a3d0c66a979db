"""Indexes of jobs by memory and by age, and of operations by namespace, by memory and by end."""

from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_index("jobs_memory", "jobs", ["memory"])
    op.create_index("jobs_oldest", "jobs", ["create_time_us", "id"])
    op.create_index("operations_namespace", "operations", ["namespace", "id"])
    op.create_index("operations_memory", "operations", ["namespace", "memory", "id"])
    op.create_index("operations_end", "operations", ["end_time_us"])
