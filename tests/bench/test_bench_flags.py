"""Every program of bench/ has the flags that its README says they all have."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
PROGRAMS = sorted(
    {
        ".".join(path.relative_to(BENCH.parent).with_suffix("").parts)
        for path in BENCH.rglob("*.py")
        if "report.parser(" in path.read_text()
    }
)

pytestmark = pytest.mark.engine  # some import vLLM


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_takes_quick_and_check(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(program)
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert {"--quick", "--check", "--out"} <= set(re.findall(r"--\w+", said))


def test_the_programs_that_the_readme_names_have_these_flags() -> None:
    named = set(re.findall(r"`python -m (bench[.\w]*)", (BENCH / "README.md").read_text()))
    have = {program.removesuffix(".__main__") for program in PROGRAMS}
    assert named <= have
