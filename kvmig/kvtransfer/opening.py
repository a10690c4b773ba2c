"""What a source asks of a destination, and the transport that its first answer agrees on."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from kvmig.engines import base
from kvmig.ground.errors import PeerError
from kvmig.kvtransfer.block_sender import BlockSender
from kvmig.kvtransfer.compat import fingerprint
from kvmig.kvtransfer.copier import Copier
from kvmig.kvtransfer.errand import Errand
from kvmig.kvtransfer.experience import Experience
from kvmig.kvtransfer.messages import Reserve, Reserved
from kvmig.kvtransfer.shuttle import Shuttle
from kvmig.kvtransfer.source_actions import SendReserve
from kvmig.kvtransfer.throttle import Throttle
from kvmig.kvtransfer.transports.base import Staging


class Opening:
    """Of one migration; the rest of what it needs to send blocks."""

    def __init__(
        self,
        errand: Errand,
        stagings: Mapping[str, Staging],
        experience: Experience,
        shuttle: Shuttle,
        throttle: Throttle,
    ) -> None:
        """`stagings`: by transport's name, the best first; all are offered."""
        self._errand = errand
        self._stagings = stagings
        self._experience = experience
        self._shuttle = shuttle
        self._throttle = throttle

    def reserve(self, asked: SendReserve, export: base.Export | None) -> Reserve:
        """The message; stage 0 brings the offers and, in its payload, the request."""
        move, stage, num_tokens = self._errand.move, asked.stage, asked.num_tokens
        if stage:
            return Reserve(
                move.mid, move.request_id, move.epoch, stage, num_tokens, last=asked.last
            )
        return Reserve(
            move.mid,
            move.request_id,
            move.epoch,
            stage,
            num_tokens,
            export=export and structs.replace(export, payload=[]),
            gateway=move.gateway,
            output_tokens=move.output_tokens,
            model=fingerprint(self._errand.engine.layout),
            numerics=self._errand.engine.numerics,
            inexact=move.inexact,
            offers=[staging.offer() for staging in self._stagings.values()],
        )

    def sender(self, answer: Reserved) -> BlockSender:
        """Over the transport that the destination wants. Raises PeerError for an unknown one."""
        errand, staging = self._errand, self._stagings.get(answer.transport)
        if staging is None:
            raise PeerError(f"the destination wants transport {answer.transport!r}")
        errand.timeline.exact = answer.exact
        errand.timeline.hit_blocks = answer.hit_blocks
        errand.timeline.transport = answer.transport
        copier = Copier(
            errand.move.mid,
            errand.engine,
            staging,
            self._experience.sizer,
            errand.send,
            errand.timeout_s,
            errand.clock,
            staging.channel(answer.token),
            self._throttle.line(errand.move.mid, errand.move.destination),
            self._shuttle,
        )
        return BlockSender(
            copier, errand.mailbox, errand.timeline, errand.engine.layout.block_bytes
        )
