"""A trace's id in the log lines of its call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any


def show_trace_ids(current: Callable[[], str]) -> Callable[[], None]:
    """Let each log line end with the trace's id from now on, where there is one; returns what ends
    that. current: the id of the call that the caller works for; empty: none.
    """
    make = logging.getLogRecordFactory()

    def made(*args: Any, **options: Any) -> logging.LogRecord:
        record = make(*args, **options)
        record.trace_id = trace_id = current()
        if trace_id:
            record.msg = f"{record.msg} trace_id={trace_id}"
        return record

    logging.setLogRecordFactory(made)
    return lambda: logging.setLogRecordFactory(make)
