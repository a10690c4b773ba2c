"""Write deploy/grafana/*.json and deploy/prometheus/kvmig.rules.yml.

python -m scripts.monitoring
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from scripts.monitoring.grafana import json_of
from scripts.monitoring.panels import BOARDS
from scripts.monitoring.rules import AlertTimes, rules_of

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = "prometheus/kvmig.rules.yml"
HEAD = "# Written by `python -m scripts.monitoring`: change scripts/monitoring/rules.py.\n"


def files() -> Mapping[str, str]:
    """The texts of all files, by their paths below deploy/."""
    found = {f"grafana/{one.file}": json_of(one) for one in BOARDS}
    return found | {RULES: rules_text(AlertTimes())}


def rules_text(times: AlertTimes) -> str:
    """The file of rules."""
    return HEAD + yaml.safe_dump(rules_of(times), sort_keys=False, width=96)


def main() -> int:
    for name, text in files().items():
        path = DEPLOY / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
