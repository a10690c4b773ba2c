"""Tokens that calls were granted of their keys' quotas and haven't settled yet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "grants",
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("key_id", sa.Text, nullable=False, index=True),
        sa.Column("period", sa.Text, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
    )
