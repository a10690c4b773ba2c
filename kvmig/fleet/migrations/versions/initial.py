"""The tables of 0.1.0: catalogue, users, keys, audit, usage, grants, the wanted placement.

Databases from before 0.1.0 reached this schema by seven more revisions; hence the number.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = None

REFUSAL = "rows of audit are never changed"


def upgrade() -> None:
    """Create the tables."""
    create_accounts()
    create_catalogue()
    create_audit()
    create_usage()


def create_accounts() -> None:
    """Create what holds users, keys, and the secret of the keys' hashes."""
    op.create_table(
        "meta",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "users",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("disabled", sa.Boolean, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("limits", sa.JSON, nullable=False, server_default="{}"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("user_id", sa.Text, sa.ForeignKey("users.id"), nullable=False, index=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("prefix", sa.Text, nullable=False, unique=True),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.Column("terms", sa.JSON, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("revoked_at", sa.Double),
        sa.Column("version", sa.Integer, nullable=False, index=True),
        sa.Column("origin", sa.Text, nullable=False, server_default="", index=True),
    )


def create_catalogue() -> None:
    """Create what holds models with their revisions, aliases, and the wanted placement."""
    op.create_table(
        "models",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
    )
    op.create_table(
        "revisions",
        sa.Column(
            "model_id", sa.Text, sa.ForeignKey("models.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("n", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("author", sa.Text, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
    )
    op.create_table(
        "aliases",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("model_id", sa.Text, sa.ForeignKey("models.id"), primary_key=True),
        sa.Column("weight", sa.Integer, nullable=False),
    )
    op.create_table(
        "placement",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("wanted", sa.JSON, nullable=False),
    )


def create_audit() -> None:
    """Create the audit, whose rows a trigger keeps as they are."""
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("object", sa.Text, nullable=False),
        sa.Column("before", sa.JSON),
        sa.Column("after", sa.JSON),
        sqlite_autoincrement=True,
    )
    if op.get_bind().dialect.name == "sqlite":
        for change in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_no_{change.lower()} BEFORE {change} ON audit"
                f" BEGIN SELECT RAISE(ABORT, '{REFUSAL}'); END"
            )
    else:
        op.execute(
            "CREATE FUNCTION audit_refuse() RETURNS trigger LANGUAGE plpgsql AS"
            f" $$ BEGIN RAISE EXCEPTION '{REFUSAL}'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_refuse BEFORE UPDATE OR DELETE OR TRUNCATE ON audit"
            " FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse()"
        )


def create_usage() -> None:
    """Create what calls used (a row each, and each day's sums), pruned rows, and open grants."""
    op.create_table(
        "usage",
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("call_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False, index=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("began", sa.Double, nullable=False, index=True),
        sa.Column("ended", sa.Double),
        sa.Column("prompt", sa.BigInteger, nullable=False),
        sa.Column("cached", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("output", sa.BigInteger, nullable=False),
        sa.Column("sequences", sa.Integer, nullable=False),
        sa.Column("moves", sa.Integer, nullable=False, server_default="0"),
        sa.Column("reruns", sa.Integer, nullable=False),
        sa.Column("ttft_ms", sa.Double),
        sa.Column("status", sa.Text, nullable=False),
    )
    op.create_table(
        "usage_daily",
        sa.Column("day", sa.Text, primary_key=True),
        sa.Column("key_id", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("calls", sa.BigInteger, nullable=False),
        sa.Column("prompt", sa.BigInteger, nullable=False),
        sa.Column("cached", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("output", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "usage_pruned",
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("first", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("last", sa.Integer, nullable=False),
    )
    op.create_table(
        "grants",
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("key_id", sa.Text, nullable=False, index=True),
        sa.Column("day", sa.Text, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("model", sa.Text, nullable=False, server_default=""),
    )
