"""Logs of kvmig's processes, without what is secret in URLs."""

from __future__ import annotations

import logging

from kvmig.core.shown_urls import shown_url


class ShownFormatter(logging.Formatter):
    """Formats log lines, with tracebacks, as `shown_url` shows them."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return shown_url(super().format(record))


def log_to_stderr(form: str, level: int = logging.WARNING) -> None:
    """Let the root logger, unless it has a handler, write lines to stderr without secrets of URLs.

    form: of a line, as `logging.Formatter` takes it.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(ShownFormatter(form))
    logging.basicConfig(handlers=[handler], level=level)
