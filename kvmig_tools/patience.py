"""How long tests wait for what a real server, engine or fleet does in any case."""

from __future__ import annotations

SERVER_PATIENCE_S = 300.0
"""For a start, an answer or an end: far more than any takes, on a machine as busy as it may be. It
is no bound that kvmig promises: a test of such a bound has its own. pytest ends a test after twice
as long."""
