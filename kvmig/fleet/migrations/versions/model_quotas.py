"""Of which model's tokens a grant is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the column."""
    op.add_column("grants", sa.Column("model", sa.Text, nullable=False, server_default=""))
