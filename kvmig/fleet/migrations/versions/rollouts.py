"""Roll-outs of models: from which revision to which, and how far they are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "rollouts",
        sa.Column(
            "model_id",
            sa.Text,
            sa.ForeignKey("models.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("base", sa.Integer, nullable=False),
        sa.Column("target", sa.Integer, nullable=False),
        sa.Column("canary", sa.JSON, nullable=False),
        sa.Column("hold_s", sa.Double, nullable=False),
        sa.Column("deadline_s", sa.Double),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("since", sa.Double, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("why", sa.Text, nullable=False),
    )
