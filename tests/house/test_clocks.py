"""Which clocks kvmig reads: a machine's wall clock may jump."""

from __future__ import annotations

import re

from tests.house.test_house import MODULES, PACKAGE

WALL = re.compile(r"\btime\.time\(|\btime_ns\(|datetime\.(?:now|utcnow|today)\(|CLOCK_REALTIME")
SHOWN = {
    "cli/machine_facts.py", "cli/placement_rates.py", "cli/usage.py", "command/deployment.py",
    "engines/vllm/load_choice.py", "engines/vllm/migration.py", "kvtransfer/timeline.py",
    "frontend/openai/answers.py", "frontend/openai/routes.py",
    "fleet/pages/usage.py", "fleet/store.py", "proxy/process.py",
}  # fmt: skip
"""Where it is only told to people, to clients, or to vLLM as a request's arrival (which vLLM
orders requests by that come to one engine, and reports)."""
EXPIRING = {
    "fleet/accounts_api.py", "fleet/api.py", "fleet/login_api.py", "fleet/pages/backend.py",
    "fleet/pages/provider_login.py", "fleet/server.py", "fleet/usage_api.py",
}  # fmt: skip
"""Where keys end, at a date that people have given, and the periods of their quotas."""
OF_FILES = {"process/forkable.py"}
"""Where it is compared with when files were written."""


def test_nothing_is_decided_or_waited_for_by_the_wall_clock() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in MODULES if WALL.search(path.read_text())}
    assert found == SHOWN | EXPIRING | OF_FILES
