"""What calls use besides tokens: characters of speech, seconds of recordings, images."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Add the columns."""
    for table in ("usage", "usage_daily"):
        for name in ("characters", "seconds", "images"):
            op.add_column(table, sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
