"""Limits of users; keys that were rotated one into another; grants by days."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the columns. A grant that is open keeps its key's period, which is how days begin."""
    op.add_column("users", sa.Column("limits", sa.JSON, nullable=False, server_default="{}"))
    op.add_column("api_keys", sa.Column("origin", sa.Text, nullable=False, server_default=""))
    op.execute("UPDATE api_keys SET origin = id")
    op.create_index("ix_api_keys_origin", "api_keys", ["origin"])
    op.execute("ALTER TABLE grants RENAME COLUMN period TO day")
