"""Workers: their labels, and what was ordered of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "workers",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("cordoned", sa.Boolean, nullable=False),
        sa.Column("drained_at", sa.Double),
        sa.Column("drain_until", sa.Double),
    )
