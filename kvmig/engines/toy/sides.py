"""Both ends of a migration: what the toy keeps of requests that leave and requests that come."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvmig.engines.base import Export, Stage, Tail
from kvmig.engines.toy.batch import Batch, Request
from kvmig.engines.toy.cache import Cache
from kvmig.engines.toy.payload import Moving
from kvmig.ground.errors import MigrationRefused, RequestGone


@dataclass
class Leaving:
    """A request that was exported. A preemption since then takes its blocks: it can't go on."""

    request: Request
    preemptions: int
    suspended: bool = False


class Source:
    """Requests that leave. Until `release` they can go on here at any moment."""

    def __init__(self, batch: Batch, cache: Cache) -> None:
        self._batch = batch
        self._cache = cache
        self._leaving: dict[str, Leaving] = {}

    def export(self, request_id: str) -> Export:
        """All of it but the KV; it runs on."""
        request = self._batch.find(request_id)
        if request is None:
            raise RequestGone("unknown_request", f"{request_id} is not here")
        self._leaving[request_id] = Leaving(request, request.preemptions)
        return Export(request_id, len(request.tokens), [_encode(request)])

    def stage(self, request_id: str, sent: int) -> Stage:
        """Full blocks: no step writes them any more, so they can be copied while it runs on."""
        request = self._checked(request_id).request
        full = request.computed // self._cache.block_tokens
        room = len(request.tokens) if request.blocks else 0  # one that waits needs none yet
        return Stage(request.blocks[sent:full], room, request.num_outputs > 0)

    def suspend(self, request_id: str, sent: int) -> Tail:
        """Out of the batch, but with its blocks; the last of them is part full."""
        leaving = self._checked(request_id)
        request = leaving.request
        leaving.suspended = True
        self._batch.remove(request)
        used = self._cache.needed(request.computed)
        return Tail(
            request.blocks[sent:used], len(request.tokens), request.num_outputs, _encode(request)
        )

    def resume(self, request_id: str) -> None:
        """Back to where it was, if it still lives."""
        leaving = self._leaving.pop(request_id, None)
        if leaving is not None and leaving.suspended:
            self._batch.put_back(leaving.request)

    def release(self, request_id: str) -> None:
        """It runs elsewhere now."""
        leaving = self._leaving.pop(request_id, None)
        if leaving is not None and leaving.suspended:
            self._cache.give_back(leaving.request.blocks)

    def forget(self, request_id: str) -> Request | None:
        """Its client has left; the request, if it was suspended."""
        leaving = self._leaving.pop(request_id, None)
        return leaving.request if leaving is not None and leaving.suspended else None

    def suspended(self) -> list[Request]:
        """Requests out of the batch on a migration's behalf."""
        return [one.request for one in self._leaving.values() if one.suspended]

    def _checked(self, request_id: str) -> Leaving:
        """Still here, and with the blocks that it had at the export."""
        leaving = self._leaving.get(request_id)
        if leaving is None:
            raise RequestGone("unknown_request", f"{request_id} was not exported")
        request = leaving.request
        if self._batch.find(request_id) is not request:
            del self._leaving[request_id]
            raise RequestGone("finished", f"{request_id} has ended")
        if request.preemptions != leaving.preemptions:
            del self._leaving[request_id]
            raise RequestGone("preempted", f"{request_id} was preempted")
        return leaving


class Destination:
    """Requests that come. Until `commit` they are elsewhere; those that run hold blocks here."""

    def __init__(self, batch: Batch, cache: Cache) -> None:
        self._batch = batch
        self._cache = cache
        self._arriving: dict[str, Request] = {}

    def reserve(self, export: Export) -> int:
        """Blocks for the request. This engine shares no prefixes, so none has its KV yet."""
        request_id = export.request_id
        if self._batch.find(request_id) is not None or request_id in self._arriving:
            raise MigrationRefused("already_migrating", f"{request_id} is here")
        request = _decode(request_id, export.payload)
        asked = request.asked
        most = self._cache.needed(len(asked.prompt_token_ids) + asked.max_tokens)
        if most > self._cache.layout.num_blocks:
            raise MigrationRefused("incompatible", f"{most} blocks will never be free")
        if request.computed:
            self._take(request, len(request.tokens))
        self._arriving[request_id] = request
        return 0

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Room for so many tokens, and a block more; if there is none the reservation ends."""
        request = self.known(request_id)
        try:
            self._take(request, num_tokens + self._cache.block_tokens)
        except MigrationRefused:
            self.cancel(request_id)
            raise
        return list(request.blocks)

    def commit(self, request_id: str, tail: Tail) -> None:
        """From now on it runs here, and nowhere else."""
        arriving = self.known(request_id)
        request = _decode(request_id, [tail.state])
        request.client, request.blocks = arriving.client, arriving.blocks
        request.owed = request.computed > 0
        if self._cache.needed(request.computed) > len(request.blocks):
            raise MigrationRefused("no_blocks", f"{request.computed} tokens were never reserved")
        del self._arriving[request_id]
        if not request.computed:
            self._cache.give_back(request.blocks)  # it waits here as it did there
        self._batch.enter(request)

    def cancel(self, request_id: str) -> None:
        """Give back all that it held."""
        request = self._arriving.pop(request_id, None)
        if request is not None:
            self._cache.give_back(request.blocks)

    def _take(self, request: Request, num_tokens: int) -> None:
        """Room for so many tokens; with its first blocks a request has a place in the batch."""
        if not request.blocks:
            taken = len(self._batch.running) + sum(bool(o.blocks) for o in self._arriving.values())
            if taken >= self._batch.max_running:
                raise MigrationRefused("no_batch_slot", f"{taken} requests run, or are about to")
        if not self._cache.take(request.blocks, num_tokens):
            raise MigrationRefused("no_blocks", f"no room for {num_tokens} tokens")

    def known(self, request_id: str) -> Request:
        """Raises MigrationRefused."""
        if request_id not in self._arriving:
            raise MigrationRefused("unknown_request", f"{request_id} has no reservation")
        return self._arriving[request_id]


def _encode(request: Request) -> bytes:
    outputs = bytes(request.tokens[len(request.asked.prompt_token_ids) :])
    return msgspec.msgpack.encode(Moving(request.asked, outputs, request.computed))


def _decode(request_id: str, payload: list[bytes]) -> Request:
    try:
        moving = msgspec.msgpack.decode(b"".join(payload), type=Moving)
        tokens = bytearray(moving.asked.prompt_token_ids) + moving.outputs
    except (msgspec.MsgspecError, ValueError) as error:
        raise MigrationRefused("incompatible", f"an export of another kind: {error}") from error
    return Request(request_id, 0, moving.asked, tokens, moving.computed)
