"""The server that leads: its token, its beat and its host."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "leadership",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("beat", sa.BigInteger, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
    )
