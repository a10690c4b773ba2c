"""Alembic runs this to migrate the database that `kvmig.fleet.tables` has opened."""

from __future__ import annotations

from alembic import context

from kvmig.fleet.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite's ALTER TABLE can do little
)
with context.begin_transaction():
    context.run_migrations()
