"""What else decides how much memory a model takes apart from weights and KV cache."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Add the columns; what was measured before doesn't have them."""
    for name, kind, default in (("kinds", sa.Text, ""), ("vocabulary", sa.BigInteger, "0")):
        op.add_column(
            "measured_rests", sa.Column(name, kind, nullable=False, server_default=default)
        )
