"""One instance compiles a model at a time, and those that come meanwhile wait for it."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvmig.engines.vllm.compile_turns import compile_turn

PATIENT_S = 30.0


class Waiter(threading.Thread):
    """Somebody who compiles the same."""

    def __init__(self, folder: Path, timeout_s: float = PATIENT_S) -> None:
        super().__init__(daemon=True)
        self._folder, self._timeout_s = folder, timeout_s
        self.turn = threading.Event()
        self.start()

    def run(self) -> None:
        with compile_turn(self._folder, "key", self._timeout_s):
            self.turn.set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "torch_compile_cache"


def test_a_second_one_waits_until_the_first_has_compiled_and_later_ones_do_not(
    folder: Path,
) -> None:
    with compile_turn(folder, "key") as first:
        waits = [Waiter(folder), Waiter(folder)]
        assert not waits[0].turn.wait(0.2)
        with compile_turn(folder, "another"):
            pass
        first.end(compiled=True)
        assert all(one.turn.wait(PATIENT_S) for one in waits), "both at once: nothing is compiled"
    with compile_turn(folder, "key") as late, compile_turn(folder, "key"):
        late.end(compiled=True)


def test_where_compiling_failed_the_next_one_has_its_turn(folder: Path) -> None:
    waits: list[Waiter] = []

    def compile_badly() -> None:
        with compile_turn(folder, "key"):
            waits.append(Waiter(folder))
            assert not waits[0].turn.wait(0.2)
            raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        compile_badly()
    assert waits[0].turn.wait(PATIENT_S)


HOLDER = """
import sys, time
from pathlib import Path
from kvmig.engines.vllm.compile_turns import compile_turn
with compile_turn(Path(sys.argv[1]), "key"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_that_is_killed_while_it_compiles_holds_up_nobody(folder: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            waits = Waiter(folder)
            assert not waits.turn.wait(0.2)
        finally:
            holder.kill()
    assert waits.turn.wait(PATIENT_S)


def test_one_that_waits_too_long_compiles_for_itself(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with compile_turn(folder, "key"):
        assert Waiter(folder, timeout_s=0.1).turn.wait(PATIENT_S)
    assert "another instance has compiled for more than 0.1 s" in caplog.text


def test_a_folder_that_can_not_be_written_to_only_costs_the_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "file").touch()
    with compile_turn(tmp_path / "file", "key"):
        pass
    assert "are not shared" in caplog.text
