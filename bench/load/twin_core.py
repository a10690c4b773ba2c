"""`python -m bench.load.twin_core ADDRESS GROUPS INPUT OUTPUT ...`: vLLM's engine core, a stub.

It speaks to vLLM's own front ends as EngineCoreProc does (vllm/v1/engine/core.py,
process_input_sockets and process_output_sockets): over a DEALER and a PUSH to each, with vLLM's
own structs and encoder. Its requests are in as many groups as kvmig's are on instances, which
get their tokens at the same pace.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import uvloop
import zmq
import zmq.asyncio

from bench.load.orders import Answer, Done, GetLog, Log, Order, SetRate, obey
from bench.load.pace import Given, Group, Metronome
from bench.load.words import VllmWords
from kvmig.engines.registry import kind_of
from kvmig.process.child import until_stopped


class Core:
    """addresses: of each front end's sockets, (input, output)."""

    def __init__(self, groups: int, addresses: Sequence[tuple[str, str]]) -> None:
        from vllm.utils.network_utils import make_zmq_socket
        from vllm.v1.engine import EngineCoreRequestType
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self._types = EngineCoreRequestType
        self._words = VllmWords()
        self._decoder, self._encoder = MsgpackDecoder(), MsgpackEncoder()
        self._metronome = Metronome()
        self._groups = [Group() for _ in range(groups)]
        self._where: dict[str, Group] = {}
        context = zmq.asyncio.Context.instance()
        identity = (0).to_bytes(2, "little")
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        for to_us, from_us in addresses:
            self._inputs.append(make_zmq_socket(context, to_us, zmq.DEALER, False, identity))
            self._outputs.append(make_zmq_socket(context, from_us, zmq.PUSH, linger=0))

    async def carry_out(self, order: Order) -> Answer:
        if isinstance(order, SetRate):
            self._metronome.set(order.rate)
            return Done()
        assert isinstance(order, GetLog)
        return Log([one.ticks for one in self._groups], [one.began for one in self._groups])

    async def run(self, address: str) -> None:
        """Until SIGTERM, or until nobody holds the other end of stdin."""
        tasks = [asyncio.create_task(obey(address, self.carry_out))]
        for number, group in enumerate(self._groups):
            phase = number / len(self._groups)
            step = _step(self, group)
            tasks.append(asyncio.create_task(self._metronome.run(phase, step)))
        for client, socket in enumerate(self._inputs):
            await socket.send(msgspec.msgpack.encode(self._words.ready()))
            tasks.append(asyncio.create_task(self._listen(client, socket)))
        stopped = asyncio.create_task(until_stopped())
        done, _ = await asyncio.wait((*tasks, stopped), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _listen(self, client: int, socket: Any) -> None:
        while True:
            kind, *frames = await socket.recv_multipart()
            match self._types(kind):
                case self._types.ADD:
                    self._add(client, self._words.request(frames))
                case self._types.ABORT:
                    for request_id in self._decoder.decode(frames):
                        if group := self._where.pop(request_id, None):
                            group.end(request_id)
                case self._types.UTILITY:
                    _, call_id, method, _ = self._decoder.decode(frames)
                    self._answer(client, call_id, method)

    def _add(self, client: int, request: Any) -> None:
        group = min(self._groups, key=len)
        self._where[request.request_id] = group
        tokens = request.sampling_params.max_tokens
        self.put_out(client, [group.begin(request.request_id, client, tokens)])

    def _answer(self, client: int, call_id: int, method: str) -> None:
        from vllm.v1.engine import EngineCoreOutputs

        outputs = EngineCoreOutputs(utility_output=self._words.utility(call_id, method))
        self._send(client, self._encoder.encode(outputs))

    def put_out(self, client: int, given: Sequence[Given]) -> None:
        for one in given:
            if one.last:
                del self._where[one.request_id]
        self._send(client, self._words.say(given))

    def _send(self, client: int, frames: Sequence[Any]) -> None:
        asyncio.ensure_future(
            self._outputs[client].send_multipart(frames, flags=zmq.DONTWAIT, copy=False)
        ).result()


def _step(core: Core, group: Group) -> Any:
    def step() -> None:
        for client, given in group.tick().items():
            core.put_out(client, given)

    return step


def main(argv: list[str]) -> None:
    address, groups, *paths = argv[1:]
    kind_of("vllm").prepare()
    core_addresses = list(zip(paths[::2], paths[1::2], strict=True))

    async def run() -> None:
        await Core(int(groups), core_addresses).run(address)

    uvloop.run(run())


if __name__ == "__main__":
    main(sys.argv)
