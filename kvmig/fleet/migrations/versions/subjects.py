"""Which person of an identity provider a user is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Add the column; users until now are of no identity provider."""
    op.add_column("users", sa.Column("subject", sa.Text, nullable=False, server_default=""))
