"""Two requests that move between the same instances at the same time."""

from __future__ import annotations

import time
from collections.abc import Iterator

from kvmig_tools.check.explore import Explorer, Result
from kvmig_tools.check.pairs import count
from kvmig_tools.check.request import Request
from kvmig_tools.check.together import Comparison, Together

AT_ONCE = frozenset({"Lost", "look", "overdue", "back"})
"""Events in which a front end sees to one request after the other."""


class Two:
    """compared: requests like these (of the same names) that were explored with as many faults
    as their parts are compared with."""

    def __init__(
        self, requests: tuple[Request, Request], compared: tuple[Request, Request], faults: int
    ) -> None:
        self._requests = requests
        self._compared = compared
        self._faults = faults

    def run(self) -> Result:
        """What holds for each of them, that each is alone, and how many states both have."""
        began = time.process_time()
        result = Result()
        for number, request in enumerate(self._requests, 1):
            one = Explorer(request, self._faults).run()
            result.states += one.states
            result.events += one.events
            result.ends += one.ends
            if one.gap_s > result.gap_s:
                result.gap_s, result.gap = one.gap_s, one.gap
            if one.violation and not result.violation:
                result.violation = f"request {number}: {one.violation}"
                result.trace = one.trace
        for place, comparison in self._comparisons():
            if result.violation:
                break
            found = comparison.run()
            result.shared += found.states
            result.events += found.events
            if found.differs:
                result.violation = f"at {place}, {found.differs}"
        if not result.violation:
            result.pairs = count(*self._requests, self._faults)
        result.seconds = time.process_time() - began
        return result

    def _comparisons(self) -> Iterator[tuple[str, Comparison]]:
        first, second = self._compared
        alone = (first.library, second.library)
        for name in sorted({*first.names} & {*second.names}):
            sites = first.site(name), second.site(name)
            sites[0].share(sites[1])
            for site, request in zip(sites, self._compared, strict=True):
                if name == request.names[0]:
                    site.begin()
            starts = (
                first.start.sites[first.names.index(name)],
                second.start.sites[second.names.index(name)],
            )
            yield name, Comparison(alone, starts, Together(*sites))
        front = first.front()
        fronts = Together(front, second.front(front.table))
        starts = (first.start.front, second.start.front)
        yield "the front end", Comparison(alone, starts, fronts, AT_ONCE)
