"""Workers: the node that had the name when something was last ordered."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    """Add the column."""
    column = sa.Column("node", sa.Text, nullable=False, server_default="")
    op.add_column("workers", column)
