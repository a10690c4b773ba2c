"""`pytest --pyargs kvmig.testing --engine ...` in a checkout, where no entry point may be known."""

from __future__ import annotations

pytest_plugins = ["kvmig.testing.plugin"]
