"""What prefixes add to a dispatch: 64 instances, 20,000 sessions, prompts of 8,000 tokens.

The steps of `kvmig.frontend.instances.InstancePool.dispatch`, without its socket, on the code that
runs: marks of the prompt, who holds them, the session's last place, the policy's choice, notes of
where it went; beside the same without prefixes (`--no-prefix-dispatch`), taken in turns. The
instances report 40 marks for each of their sessions. Prompts are

- new: nobody holds any of it;
- begun: all instances hold the first 1,024 tokens;
- held: and one holds 6,400 tokens besides, a session's last turn.

Times are the processor's; figures are medians. Machines differ by three, so the target is a ratio,
too: to NumPy's stable sort and sum of 10,000 figures, taken between the dispatches.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import thread_time

import msgspec

from bench import queues, report
from kvmig.controlplane.dispatch import NewRequest, allowed
from kvmig.controlplane.messages import ClusterMember, LoadReport
from kvmig.controlplane.policy import POLICIES
from kvmig.controlplane.prefix_index import PrefixIndex
from kvmig.controlplane.session_hints import SessionHints, SessionPlace
from kvmig.controlplane.view import ViewBuilder
from kvmig.core.prefix_marks import MARK_TOKENS, MarkChain
from kvmig.engines.base import EngineLoad
from kvmig.engines.held_marks import MARK_METHOD, PrefixNews, pack_marks

INSTANCES, SESSIONS, TOKENS, BLOCK_TOKENS = 64, 20_000, 8000, 16
SHARED, HELD, MARKS_EACH = 1024, 6400, 40
KINDS = ("new", "begun", "held")
PROMPTS = 20
"""Of each kind."""
LONG_RUN = ("added_us",)
"""Three rounds don't tell it from its bound on a machine that is close to it."""
TARGETS: dict[str, report.Target] = {"added_us": {"max": 100.0}, "added_over_sort": {"max": 0.2}}


@dataclass(frozen=True)
class Sample:
    """One prompt of a kind, dispatched with prefixes and without. marks_us: of `with_us`."""

    kind: str
    with_us: float
    without_us: float
    marks_us: float
    sort_us: float


class FrontEnd:
    """What a front end knows, and how it dispatches."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names = [f"i{number}" for number in range(INSTANCES)]
        self._dispatch = POLICIES["kvmig"].dispatcher()
        self._builder = ViewBuilder()
        self._builder.members(ClusterMember(name, f"tcp://{name}") for name in self._names)
        self._prefixes = PrefixIndex()
        self._sessions = SessionHints()
        self._now = 0.0
        self._seq = 1
        shared = self._tokens(SHARED)
        self.prompts = {
            kind: [
                [*([] if kind == "new" else shared), *self._tokens(TOKENS)][:TOKENS]
                for _ in range(PROMPTS)
            ]
            for kind in KINDS
        }
        held = {name: set(MarkChain("", "").extend(shared, SHARED)) for name in self._names}
        for session in range(SESSIONS):
            name = self._random.choice(self._names)
            held[name].update(self._random.getrandbits(64) for _ in range(MARKS_EACH))
            self._sessions.remember_place(session, SessionPlace(name, TOKENS / BLOCK_TOKENS))
        for prompt in self.prompts["held"]:
            name = self._random.choice(self._names)
            held[name].update(MarkChain("", "").extend(prompt, HELD))
        for name, marks in held.items():
            self._prefixes.learn(name, PrefixNews(1, True, pack_marks(marks), method=MARK_METHOD))

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(128_000) for _ in range(count)]

    def find_tokens(self, prompt: Sequence[int]) -> dict[str, int]:
        """Tokens of it that each instance holds."""
        return self._prefixes.find_tokens(MarkChain("", "").extend(prompt, TOKENS - 1), self._now)

    def report_loads(self) -> None:
        """All report, and time passes: nothing that was dispatched is pending."""
        self._now += 1.0
        self._seq += 1
        for name in self._names:
            used, running = self._random.randrange(3000, 9000), self._random.randrange(5, 30)
            load = EngineLoad(25_000, used, running, 0, 0, 0)
            self._builder.report(LoadReport(name, self._seq, load, 0, 0), self._now)

    def place(self, prompt: Sequence[int], session: int, *, prefixes: bool) -> tuple[float, float]:
        """Dispatch it: microseconds in all, and those of its marks. As in a front end, it has been
        encoded for its instance just before."""
        msgspec.msgpack.encode(prompt)
        began, now = thread_time(), self._now
        demand = -(-(len(prompt) + 1) // BLOCK_TOKENS)
        marks = MarkChain("", "").extend(prompt, len(prompt) - 1) if prefixes else ()
        marked = thread_time()
        held = self._prefixes.find_blocks(marks, now, BLOCK_TOKENS)
        last = self._sessions.find(session) if prefixes else None
        if last is not None and not (marks and self._prefixes.has_report_of(last.instance)):
            held.setdefault(last.instance, last.presumed_blocks(demand))
        request = NewRequest(demand, held_blocks=held)
        chosen = self._dispatch.pick(allowed(self._builder.view(now), request), request).instance
        self._builder.dispatched(chosen, demand, now)
        self._prefixes.expect(chosen, marks, now)
        if prefixes:
            self._sessions.remember_place(session, SessionPlace(chosen, demand))
        ended = thread_time()
        return (ended - began) * 1e6, (marked - began) * 1e6


def measure(rounds: int) -> list[Sample]:
    """Samples of all kinds, in turns."""
    front, random_session = FrontEnd(1), random.Random(2)
    samples: list[Sample] = []
    for _ in range(rounds):
        for number in range(PROMPTS):
            front.report_loads()
            for kind in KINDS:
                prompt, session = front.prompts[kind][number], random_session.randrange(SESSIONS)
                without_us, _ = front.place(prompt, session, prefixes=False)
                with_us, marks_us = front.place(prompt, session, prefixes=True)
                samples.append(Sample(kind, with_us, without_us, marks_us, queues.sort_us()))
    return samples


def summarize(samples: Sequence[Sample]) -> dict[str, float]:
    """Medians by kind; `added_us`: the most of any kind."""
    summary: dict[str, float] = {}
    for kind in KINDS:
        some = [one for one in samples if one.kind == kind]
        for name in ("with_us", "without_us", "marks_us"):
            summary[f"{name}_{kind}"] = median(getattr(one, name) for one in some)
        summary[f"added_us_{kind}"] = median(one.with_us - one.without_us for one in some)
    summary["added_us"] = max(summary[f"added_us_{kind}"] for kind in KINDS)
    summary["sort_us"] = median(one.sort_us for one in samples)
    summary["added_over_sort"] = summary["added_us"] / summary["sort_us"]
    return summary


def main(argv: list[str] | None = None) -> int:
    options = report.parser(__doc__, LONG_RUN).parse_args(argv)
    rounds = 3 if options.quick else 20
    settings = {
        "instances": INSTANCES, "sessions": SESSIONS, "tokens": TOKENS, "rounds": rounds,
        "mark_tokens": MARK_TOKENS, "marks_each": MARKS_EACH,
    }  # fmt: skip
    result = report.begin("prefix_cost", settings)
    samples = measure(rounds)
    result.samples = [asdict(one) for one in samples]
    result.summary, result.targets = summarize(samples), TARGETS
    columns = ("with_us", "without_us", "marks_us", "added_us")
    rows = [(kind, *(result.summary[f"{name}_{kind}"] for name in columns)) for kind in KINDS]
    return report.finish(result, options, [report.table("a dispatch", ("prompt", *columns), rows)])


if __name__ == "__main__":
    sys.exit(main())
