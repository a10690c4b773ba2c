"""From the logs of both ends: how long tokens took from the engine to the client. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from bench.load.orders import Log


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, the nearest one; NaN of none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else math.nan


def delays_s(log: Log, seen: Mapping[str, Iterable[Sequence[float]]]) -> list[float]:
    """Of each token that watched streams brought; sorted.

    seen: by a part of the request's id, (tokens before, tokens then, when) of each read.
    """
    labels = {
        request_id.split("-")[1]: (log.ticks[group], began)
        for group, requests in enumerate(log.began)
        for request_id, began in requests.items()
    }
    delays: list[float] = []
    for label, arrivals in seen.items():
        ticks, began = labels[label]
        for before, now, at in arrivals:
            # Token 0 came at once, token k with the k-th tick since.
            delays += [
                at - ticks[began + token - 1] for token in range(max(1, int(before)), int(now))
            ]
    return sorted(delays)
