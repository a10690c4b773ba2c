"""What calls had of prefix caches, and how often they moved."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the columns; 0 where nobody has counted."""
    for table in ("usage", "usage_daily"):
        op.add_column(table, sa.Column("cached", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("usage", sa.Column("moves", sa.Integer, nullable=False, server_default="0"))
