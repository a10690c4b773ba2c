"""Models' files: from where they are, in which folder, and whether they are to stay."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "model_files",
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("folder", sa.Text, nullable=False, server_default=""),
        sa.Column("revision", sa.Text, nullable=False, server_default=""),
        sa.Column("size", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("digest", sa.Text, nullable=False, server_default=""),
        sa.Column("pulled", sa.Boolean, nullable=False),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("last_used", sa.Double, nullable=False),
    )
