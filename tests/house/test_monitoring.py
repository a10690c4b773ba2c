"""The dashboards and alerts of deploy/ are what the code writes, and ask for what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.golden_outputs import metrics
from scripts.monitoring.__main__ import DEPLOY, RULES, files
from scripts.monitoring.panels import BOARDS, BoardSpec
from scripts.monitoring.rules import AlertTimes, alert_rules

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "house" / "alert_rules.yml"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool: Debian's prometheus")
NAME = re.compile(r"\bkvmig_[a-z_]+")
OTHER_UNITS = re.compile(r"_(ns|us|ms|s|[kmg]i?b|percent|milliseconds|minutes|hours)(_|$)")
UNIT_INSIDE = re.compile(r"_(seconds|bytes|ratio)_(?!total$)")
SUFFIXES = re.compile(r"_(total|bucket|count|sum|info)$")


def written() -> str:
    """The text of all modules that define metrics."""
    modules = [*(ROOT / "kvmig").rglob("*metrics.py"), ROOT / "kvmig/frontend/middleware.py"]
    return "\n".join(path.read_text() for path in modules)


def promtool(*words: str | Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", list(files()))
def test_a_file_is_what_the_code_writes(name: str) -> None:
    assert (DEPLOY / name).read_text() == files()[name], "run `python -m scripts.monitoring`"


def test_no_other_dashboard_lies_there() -> None:
    found = {f"grafana/{path.name}" for path in (DEPLOY / "grafana").glob("*.json")}
    assert found == {name for name in files() if name.startswith("grafana/")}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_each_panel_has_a_place_of_its_own(board: BoardSpec) -> None:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / board.file).read_text())
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in found["panels"]}) == len(board.panels)


def test_every_metric_that_is_asked_for_is_one_of_kvmigs() -> None:
    asked = [query.expr for board in BOARDS for panel in board.panels for query in panel.queries]
    asked += [rule["expr"] for rule in alert_rules(AlertTimes())]
    text = written()
    names = {name for expr in asked for name in NAME.findall(expr)}
    columns = {"kvmig_instance_" + name for name in re.findall(r'^    "([a-z_]+)": "', text, re.M)}
    unknown = {one for one in names - columns if f'"{SUFFIXES.sub("", one)}' not in text}
    assert unknown == set()


def test_every_metric_says_what_it_is_and_its_name_ends_with_a_base_unit_if_it_has_one() -> None:
    shown = [line for text in metrics().values() for line in text.splitlines()]
    assert [line for line in shown if not re.search(r": [A-Z1].*\.$", line)] == []
    timed = {line.split(" ")[0] for line in shown if " histogram " in line}
    names = {line.split(" ")[0] for line in shown} | set(
        re.findall(r'"(kvmig_[a-z_]+)"', written())
    )
    assert [one for one in timed if not one.endswith("_seconds")] == []
    assert [one for one in names if OTHER_UNITS.search(one) or UNIT_INSIDE.search(one)] == []


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    fired = {
        test["alertname"]
        for case in cases
        for test in case["alert_rule_test"]
        if test["exp_alerts"]
    }
    alerts = {rule["alert"] for rule in alert_rules(AlertTimes())}
    assert alerts - fired == {"KvmigTtftBurnsSlow", "KvmigTpotBurnsFast"}  # as the other goal's


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", DEPLOY / RULES)


@needs_promtool
def test_promtool_accepts_the_query_of_every_panel(tmp_path: Path) -> None:
    asked = [query.expr for board in BOARDS for panel in board.panels for query in panel.queries]
    rules = [
        {"record": f"panel:{at}", "expr": expr.replace("$__rate_interval", "1m")}
        for at, expr in enumerate(asked)
    ]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", file)


@pytest.mark.long
@needs_promtool
def test_each_alert_fires_when_it_should_and_not_before() -> None:
    promtool("test", "rules", CASES)


@needs_promtool
def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    folder = DEPLOY / "prometheus"
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "admin-key").write_text("kv-x")
    promtool("check", "config", tmp_path / "prometheus.yml")
