"""The placement that is wanted: one row, or none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "placement",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("wanted", sa.JSON, nullable=False),
    )
