"""Which prompts an engine needn't compute: blocks that are free but still hold their KV.

vLLM keeps what a freed block holds until somebody takes the block; the longest freed goes
first. A key stands for one prefix: that of a request itself, which comes back after a
preemption, or one that several requests of a trace share.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from kvmig_tools.sim.request import SimRequest


class PrefixCache:
    """Blocks by key, never more than are free.

    A prefix that a running request shares is there as long as that runs. Those that run
    hold a copy each: that blocks in use are shared isn't modelled.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: OrderedDict[str, int] = OrderedDict()
        self._total = 0
        self._running: Counter[str] = Counter()
        self.asked_tokens = 0
        """Tokens of all prompts that were begun, without those of requests that were preempted
        (vLLM's `prefix_cache_queries` leaves them out, too), and..."""
        self.hit_tokens = 0
        """... those of them that needn't be computed."""

    def start(self, request: SimRequest) -> int:
        """The request takes its blocks; how many of its tokens needn't be computed."""
        # The last token is always computed: its logits are wanted.
        hits = min(self._known(request), (request.tokens - 1) // self._block_tokens)
        self.joined(request)
        if not request.was_preempted:
            self.asked_tokens += request.tokens
            self.hit_tokens += hits * self._block_tokens
        return hits * self._block_tokens

    def held_blocks(self, request: SimRequest) -> int:
        """Blocks of the request's prompt that needn't be computed here."""
        return self._known(request)

    def hits(self, request: SimRequest, computed: int) -> int:
        """Blocks of a request that is on its way here which needn't be copied.

        computed: tokens whose KV its source has; as in vLLM's adapter a hit of more is none.
        """
        hits = self._known(request)
        return hits if hits * self._block_tokens <= computed else 0

    def joined(self, request: SimRequest) -> None:
        """It runs here now: what was free of it is in use."""
        self._take(request.request_id)
        if request.prefix:
            if not self._running[request.prefix]:
                self._take(request.prefix)
            self._running[request.prefix] += 1

    def _known(self, request: SimRequest) -> int:
        """Blocks from its first that are here."""
        shared = request.prefix_tokens // self._block_tokens
        if not self._running[request.prefix]:
            shared = min(shared, self._blocks.get(request.prefix, 0))
        return max(self._blocks.get(request.request_id, 0), shared)

    def idle_blocks(self, prefix: str) -> int:
        """Blocks that are kept of a prefix that no running request shares."""
        return self._blocks.get(prefix, 0)

    def is_running(self, prefix: str) -> bool:
        """Whether a running request shares it."""
        return self._running[prefix] > 0

    def idle_prefixes(self) -> list[str]:
        """Prefixes that are kept, the one that was used last first; requests' own are left
        out, and those that have only come from elsewhere."""
        return [key for key in reversed(self._blocks) if key in self._running]

    def give_up(self, prefix: str) -> None:
        """What was kept of the prefix is elsewhere."""
        self._take(prefix)

    def take_in(self, prefix: str, blocks: int) -> None:
        """Blocks of the prefix came from elsewhere."""
        if not self._running[prefix] and blocks > self.idle_blocks(prefix):
            self._put(prefix, blocks)

    def freed(self, request: SimRequest, blocks: int) -> None:
        """A request that ran has left `blocks` blocks, the shared ones among them."""
        shared = 0
        if request.prefix:
            self._running[request.prefix] -= 1
            if not self._running[request.prefix]:
                shared = request.prefix_tokens // self._block_tokens
                shared = blocks if request.grows else min(shared, blocks)
                self._put(request.prefix, shared)
        self._put(request.request_id, blocks - shared)

    def _put(self, key: str, blocks: int) -> None:
        self._take(key)
        if blocks > 0:
            self._blocks[key] = blocks
            self._total += blocks

    def _take(self, key: str) -> int:
        blocks = self._blocks.pop(key, 0)
        self._total -= blocks
        return blocks

    def shrink(self, free: int) -> None:
        """So many blocks are free now: what was in others is gone."""
        while self._total > free:
            key, blocks = next(iter(self._blocks.items()))
            kept = blocks - min(blocks, self._total - free)
            self._total -= blocks - kept
            if kept:
                self._blocks[key] = kept
            else:
                del self._blocks[key]
