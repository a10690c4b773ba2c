"""The destination of `bench.transport`, in a process of its own."""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from multiprocessing.connection import Connection

from kvmig.kvtransfer.messages import Chunk, ChunkDone, PeerMessage, Refused, Reserve, Reserved
from kvmig.kvtransfer.transports.base import TransportInbox
from kvmig.kvtransfer.transports.select import TransportSite, open_offer
from kvmig.rpc.zmq_sockets import RpcServer


def serve(pipe: Connection, secret: bytes, nbytes: int) -> None:
    """Take chunks into `nbytes` of memory until the pipe says None.

    pipe: says the endpoint first; then (int) asks for a digest of that many bytes.
    """
    asyncio.run(_serve(pipe, secret, bytearray(nbytes)))


async def _serve(pipe: Connection, secret: bytes, memory: bytearray) -> None:
    server = RpcServer(secret, "llumlet", "destination", PeerMessage)
    pipe.send(server.endpoint)
    taking = asyncio.create_task(_take(server, memory))
    while (count := await asyncio.to_thread(pipe.recv)) is not None:
        pipe.send(blake2b(memoryview(memory)[:count]).digest())
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    server.close()


async def _take(server: RpcServer, memory: bytearray) -> None:
    target, inboxes = memoryview(memory), dict[str, TransportInbox]()
    try:
        while True:
            sender, message, payload = await server.recv()
            match message:
                case Reserve(mid=mid, offers=offers):
                    try:
                        site = TransportSite(host="127.0.0.1")
                        inbox = await asyncio.to_thread(open_offer, offers, "auto", site)
                        inboxes[mid] = inbox
                    except Exception as error:
                        server.send(sender, Refused(mid, "incompatible", str(error)))
                        raise
                    server.send(sender, Reserved(mid, 0, 0, inbox.transport, token=inbox.token))
                case Chunk(mid=mid, first=first, nbytes=nbytes):
                    data = await inboxes[mid].receive(message, payload[0] if payload else None)
                    target[first : first + nbytes] = data
                    server.send(sender, ChunkDone(mid, message.slot, 0.0))
    finally:
        for inbox in inboxes.values():
            inbox.close()
