"""What a process of kvmig's prints, how it loads, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", script],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_kvmigs_warnings_are_shown_and_of_libraries_only_errors() -> None:
    done = run(
        "import logging\n"
        "from kvmig.cli.processes import quiet\n"
        "quiet('i7')\n"
        "logging.getLogger('library').warning('hush')\n"
        "logging.getLogger('library').error('loud')\n"
        "logging.getLogger('kvmig.some.part').warning('ours')\n"
    )

    assert [line.split(" ", 2)[2] for line in done.stderr.splitlines()] == [
        "i7 ERROR loud",
        "i7 WARNING ours",
    ]


WARN = (
    "import warnings\n"
    "from kvmig.cli.processes import quiet\n"
    "quiet('i7')\n"
    "warnings.warn('some day', FutureWarning)\n"
)


def test_warnings_of_coming_changes_are_shown_to_who_asks_only() -> None:
    assert run(WARN).stderr == ""
    assert "some day" in run(WARN, "-W", "always").stderr


def test_no_garbage_is_collected_while_a_process_loads_and_what_it_loaded_is_never_walked() -> None:
    done = run(
        "import gc\n"
        "from kvmig.cli.processes import begin_loading, end_loading\n"
        "begin_loading()\n"
        "print(gc.isenabled())\n"
        "loaded = [[] for _ in range(100_000)]\n"
        "end_loading()\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
    )

    assert done.stdout.split() == ["False", "True", "True"]


def test_a_process_leaves_with_its_status_and_all_that_it_printed() -> None:
    done = run(
        "import atexit\n"
        "from kvmig.cli.processes import leave\n"
        "atexit.register(print, 'torn down')\n"
        "print('said', end='')\n"
        "leave(3)\n"
    )

    assert (done.returncode, done.stdout) == (3, "said")


def test_output_that_nobody_can_take_stops_nobody() -> None:
    script = (
        "from kvmig.cli.processes import leave, say\n"
        "for n in range(1000):\n"
        "    say('a line of progress')\n"
        "leave(3)\n"
    )
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, stdout=full, stderr=full, timeout=60, check=False)
    assert done.returncode == 3


def test_a_line_is_one_write_so_that_those_of_several_processes_stay_lines() -> None:
    done = run(
        "import sys\n"
        "from kvmig.cli.processes import say\n"
        "class Writes(list):\n"
        "    def write(self, text):\n"
        "        self.extend([text] if text else [])\n"
        "    def flush(self): ...\n"
        "sys.stderr = Writes()\n"
        "say('it starts')\n"
        "print(list(sys.stderr))\n"
    )

    assert done.stdout == "['kvmig: it starts\\n']\n"
