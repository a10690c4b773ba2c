"""What kvmig's processes log has no secrets of URLs in it."""

from __future__ import annotations

import logging
import subprocess
import sys

from kvmig.process.shown_logs import ShownFormatter


def test_log_lines_and_tracebacks_have_no_secret_of_a_url() -> None:
    try:
        raise ValueError("http://u:pw@h/x?token=t")
    except ValueError:
        failure = sys.exc_info()
    record = logging.LogRecord(
        "kvmig", logging.ERROR, "", 1, "at %s", ("https://u:pw@h/",), failure
    )
    line = ShownFormatter("%(levelname)s %(message)s").format(record)
    assert line.startswith("ERROR at https://u:***@h/\nTraceback")
    assert "http://u:***@h/x?token=***" in line
    assert ":pw@" not in line


def test_what_a_process_of_kvmig_logs_has_no_secret_of_a_url() -> None:
    code = (
        "import logging; from kvmig.process.child import quiet; quiet('tests');"
        "logging.getLogger('kvmig.x').warning('no answer of %s', 'http://u:pw@h/?key=k')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.endswith("tests WARNING no answer of http://u:***@h/?key=***\n")
