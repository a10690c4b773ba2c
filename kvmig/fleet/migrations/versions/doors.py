"""The address where the proxies of the host that leads take calls of other hosts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Add the column."""
    op.add_column("leadership", sa.Column("door", sa.Text, nullable=False, server_default=""))
