"""Clients' requests on their way into one engine, and the payload of each one that is here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.request import RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder

from kvmig.core.errors import MigrationRefused
from kvmig.engines.base import Frames, too_large
from kvmig.engines.vllm.building import (
    RequestBuilder,
    not_again,
    requeue_request,
    without_what_was_sent,
)
from kvmig.engines.vllm.compat import refuse
from kvmig.engines.vllm.connectors import without_load
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.migration import encode_request
from kvmig.engines.vllm.offload import CacheOffload
from kvmig.engines.vllm.outputs import failure

log = logging.getLogger(__name__)


class IncomingRequests:
    """Takes the requests of one engine in; on the event loop."""

    def __init__(self, core: StepCore, builder: RequestBuilder, offload: CacheOffload) -> None:
        self.submitted: dict[str, list[bytes]] = {}
        """The payload of each request that is here, by id: what a migration sends."""
        self.entering: dict[str, asyncio.Task[None] | Future[None]] = {}
        """Requests that are not in the engine yet."""
        self._core = core
        self._builder = builder
        self._offload = offload
        self._held: dict[str, Callable[[], None]] | None = None
        """Requests that wait until the engine is awake, by id; None: it is."""
        self._decoder = MsgpackDecoder(EngineCoreRequest)

    def submit(
        self,
        client: int,
        request_id: str,
        payload: Frames,
        output_token_ids: Sequence[int] = (),
        *,
        own: bool = False,
    ) -> None:
        """See `kvmig.engines.base.ServingEngine`. own: kvmig's, which is never held."""
        frames = [bytes(frame) for frame in payload]
        if self._held is not None and not own:
            enter = partial(self.submit, client, request_id, frames, output_token_ids)
            self._held[request_id] = enter
            return
        request: EngineCoreRequest = self._decoder.decode(frames)
        request.client_index = client
        if request.request_id != request_id:
            request.request_id = request_id
            frames = encode_request(request)
        self.submitted[request_id] = frames
        entering: asyncio.Task[None] | Future[None]
        if output_token_ids:
            entering = asyncio.ensure_future(self._go_on(request, output_token_ids))
        else:
            entering = self._builder.add(request, lambda: self._add(request))
        self.entering[request_id] = entering
        entering.add_done_callback(lambda _: self.entering.pop(request_id, None))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End the requests, those that have not entered yet, too."""
        for request_id in request_ids:
            if self._held is not None:
                self._held.pop(request_id, None)
            self.submitted.pop(request_id, None)
            entering = self.entering.get(request_id)
            if entering is not None and not entering.cancel():  # a thread is at it
                entering.add_done_callback(partial(self._abort_entered, request_id))
        self._core.abort([one for one in request_ids if one not in self.entering])

    def hold(self) -> None:
        """Let clients' requests wait that come from now on."""
        if self._held is None:
            self._held = {}

    def let_in(self) -> None:
        """Take the requests that wait, in their order, and those that come from now on."""
        held, self._held = self._held, None
        for enter in (held or {}).values():
            enter()

    def forget(self, request_id: str) -> None:
        """The request has ended here, or has gone."""
        self.submitted.pop(request_id, None)

    def why_too_large(self, request_id: str) -> str:
        """Why the payload of the request is too large for it to be moved; empty if it isn't."""
        return too_large(self.submitted.get(request_id, ()))

    def cancel(self) -> None:
        """The engine is closed: what has not entered yet never does."""
        for entering in list(self.entering.values()):
            entering.cancel()

    def _add(self, request: EngineCoreRequest) -> None:
        try:
            self._core.add(request)
        except Exception as error:  # noqa: BLE001 - reported there
            refuse(self._core, request, error)

    async def _go_on(self, request: EngineCoreRequest, output_token_ids: Sequence[int]) -> None:
        """Let a request that ran elsewhere go on here. Cancelled before its end it never enters."""
        try:
            reason = not_again(request, self._core.vllm_config)
            if reason:
                raise MigrationRefused("unsupported", reason)
            without_what_was_sent(request)
            without_load(request)
            built = await self._builder.build(request, output_token_ids, waits=False)
            generator = await self._builder.generator_after(
                request.sampling_params, len(output_token_ids)
            )
        except MigrationRefused as error:
            self._end(request, error)
            return
        except Exception as error:  # noqa: BLE001 - reported there
            refuse(self._core, request, error)
            return

        def enter() -> None:
            own = built.lora_request
            if own is not None and not self._core.has_adapter(built, own):
                return
            try:
                requeue_request(self._core, built, generator)
                self._offload.entered(built)
            except Exception as error:  # noqa: BLE001 - reported there
                aborted = RequestStatus.FINISHED_ABORTED
                self._core.scheduler.finish_requests(built.request_id, aborted)
                refuse(self._core, request, error)

        self._core.call(enter)

    def _end(self, request: EngineCoreRequest, error: MigrationRefused) -> None:
        """The client learns why its request doesn't go on here, and may try again."""
        log.warning("request %s can't go on here: %s", request.request_id, error)
        said = (
            "the request's instance has ended, and another one can't go on with it:"
            f" {error.detail or error.reason}"
        )
        output = EngineCoreOutput(
            request.request_id, [], finish_reason=FinishReason.ERROR,
            stop_reason=failure(said, "retry"),
        )  # fmt: skip
        ended = EngineCoreOutputs(outputs=[output], finished_requests={request.request_id})
        self._core.output_queue.put_nowait((request.client_index, ended))

    def _abort_entered(self, request_id: str, _: object) -> None:
        self._core.abort([request_id])
