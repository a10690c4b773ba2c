"""What instances were measured to take apart from weights and KV cache."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "measured_rests",
        sa.Column("engine", sa.Text, primary_key=True),
        sa.Column("device", sa.Text, primary_key=True),
        sa.Column("part", sa.Text, primary_key=True),
        sa.Column("family", sa.Text, primary_key=True),
        sa.Column("eager", sa.Boolean, primary_key=True),
        sa.Column("weights", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("rest", sa.BigInteger, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
    )
