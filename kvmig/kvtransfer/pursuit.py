"""How the destination gets to follow: the rest so far, then each step's tokens as they come."""

from __future__ import annotations

from kvmig.engines.base import Tail
from kvmig.ground.errors import TransportError
from kvmig.kvtransfer.block_sender import BlockSender
from kvmig.kvtransfer.errand import Errand
from kvmig.kvtransfer.feed import Feed
from kvmig.kvtransfer.mailbox import PeerLost
from kvmig.kvtransfer.messages import Follow, Tokens
from kvmig.kvtransfer.source_actions import Action


class Pursuit:
    """Of one migration."""

    def __init__(self, errand: Errand) -> None:
        self._errand = errand
        self.tokens = Feed(self._say, errand.clock)

    async def fork(self, sent: int) -> Tail:
        """The request's rest after the first `sent` blocks; its tokens are kept from here on."""
        errand = self._errand
        fork = errand.engine.fork(errand.move.request_id, sent, self.tokens.take)
        return await errand.bounded(fork)

    async def send(self, stage: int, first: int, fork: Tail, blocks: BlockSender) -> list[Action]:
        """Blocks, then Follow; what a message asks for instead, [] if none came in between."""
        if stop := await blocks.send_live(stage, first, fork.block_ids, fork.places):
            return stop
        mid = self._errand.move.mid
        self._errand.send(Follow(mid, fork, first + len(fork.block_ids)), ())
        self.tokens.begin(fork.num_output_tokens)
        return []

    def _say(self, start: int, token_ids: list[int]) -> None:
        try:
            self._errand.send(Tokens(self._errand.move.mid, start, token_ids), ())
        except TransportError:
            self._errand.mailbox.put(PeerLost())
