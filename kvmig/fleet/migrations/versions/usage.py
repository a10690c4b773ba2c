"""What calls have used: a row each, and the sums of each day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "usage",
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("call_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False, index=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("began", sa.Double, nullable=False, index=True),
        sa.Column("ended", sa.Double),
        sa.Column("prompt", sa.BigInteger, nullable=False),
        sa.Column("output", sa.BigInteger, nullable=False),
        sa.Column("sequences", sa.Integer, nullable=False),
        sa.Column("reruns", sa.Integer, nullable=False),
        sa.Column("ttft_ms", sa.Double),
        sa.Column("status", sa.Text, nullable=False),
    )
    op.create_table(
        "usage_daily",
        sa.Column("day", sa.Text, primary_key=True),
        sa.Column("key_id", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("calls", sa.BigInteger, nullable=False),
        sa.Column("prompt", sa.BigInteger, nullable=False),
        sa.Column("output", sa.BigInteger, nullable=False),
    )
