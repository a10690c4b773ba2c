"""What models take of GPUs: as their engines report it, and as it was measured."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "device_sizes",
        sa.Column("started_as", sa.Text, primary_key=True),
        sa.Column("sizes", sa.JSON),
        sa.Column("measured", sa.BigInteger, nullable=False, server_default="0"),
    )
