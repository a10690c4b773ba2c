"""Logs of kvmig's processes, without what is secret in URLs and command lines."""

from __future__ import annotations

import logging

from kvmig.core.shown_secrets import shown_text


class ShownFormatter(logging.Formatter):
    """Formats log lines, with tracebacks, as `shown_text` shows them."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return shown_text(super().format(record))


def log_to_stderr(form: str, level: int = logging.WARNING) -> None:
    """Let the root logger, unless it has a handler, write lines to stderr without secrets.

    form: of a line, as `logging.Formatter` takes it.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(ShownFormatter(form))
    logging.basicConfig(handlers=[handler], level=level)
