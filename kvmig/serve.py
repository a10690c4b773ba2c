"""`python -m kvmig.serve MODEL ...`: wires everything; nobody imports it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence

import msgspec
import uvloop

from kvmig.cli import flags as kvmig_flags
from kvmig.cli.cluster import Cluster
from kvmig.cli.environment import available_memory, gpus, memory_flags, weights_of, worker_threads
from kvmig.cli.launcher import Launcher
from kvmig.cli.local import LocalLauncher
from kvmig.cli.port import take_port
from kvmig.cli.process import leave, quiet
from kvmig.cli.ray_launcher import RayLauncher
from kvmig.cli.shapes import InstanceShape, own_flags, shapes_of, unit_tokens
from kvmig.engines.vllm import flags as vllm_flags
from kvmig.engines.vllm.scheduling_policy import scheduling_flags
from kvmig.engines.vllm.version import check_version
from kvmig.gateway.gate import GateState
from kvmig.ground.config import ClusterConfig
from kvmig.ground.errors import KvmigError

GRACE_S = 2.0
"""How long connections may take to close once nothing runs any more."""


def say(text: str) -> None:
    """One line of progress for whoever started us."""
    print(f"kvmig: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Exit code 0 after a shutdown, 2 for what is wrong before it serves, 1 for later."""
    quiet("kvmig")
    try:
        config, rest, help_wanted = kvmig_flags.parse(list(argv))
        if help_wanted is not None:
            return show_help(help_wanted)
        check_version()
        vllm_flags.set_environment()
        gpu_ids = gpus()
        own = own_flags(config.instance_flags, config.instances)
        every = [word for words in (rest, *own.values()) for word in words]
        rest = [*rest, *scheduling_flags(every, config.priorities)]
        args = vllm_flags.parse(rest)
        shapes = shapes_of(args, rest, own, config.instances, vllm_flags.parse)
        config = in_units(config, unit_tokens(shapes))
        sock = take_port(args.host, args.port)
    except KvmigError as error:
        say(str(error))
        return 2
    with sock:
        try:
            if config.ray is None:
                rest = [*rest, *share_memory(args, rest, shapes, gpu_ids)]
            return uvloop.run(Server(config, args, rest, shapes, gpu_ids, sock).run())
        except KvmigError as error:
            say(str(error))
            return 2


def show_help(what: str) -> int:
    """kvmig's flags; with `all`, vLLM's behind them."""
    kvmig_flags.parser().print_help()
    if what == "all":
        vllm_flags.set_environment()
        vllm_flags.print_help()
    return 0


def in_units(config: ClusterConfig, tokens: int) -> ClusterConfig:
    """Let instances exchange units of so many tokens; 0: blocks."""
    migration = msgspec.structs.replace(config.migration, unit_tokens=tokens)
    return msgspec.structs.replace(config, migration=migration)


def share_memory(
    args: Namespace, argv: list[str], shapes: Sequence[InstanceShape], gpu_ids: Sequence[str]
) -> list[str]:
    """vLLM flags for one worker's share of this machine. Raises ConfigError."""
    return memory_flags(
        argv,
        args.kv_cache_memory_bytes,
        [shape.workers for shape in shapes],
        len(gpu_ids),
        available_memory(),
        os.environ,
        weights_of(args.model),
    )


class Server:
    """One cluster with its front end, from start to end."""

    def __init__(
        self,
        config: ClusterConfig,
        args: Namespace,
        engine_argv: list[str],
        shapes: Sequence[InstanceShape],
        gpu_ids: Sequence[str],
        sock: socket.socket,
    ) -> None:
        secret = os.environ.get("KVMIG_SECRET", "").encode() or secrets.token_bytes(32)
        self._config = config
        self._args = args
        self._sock = sock
        self._gate = GateState()
        name = secrets.token_hex(4)
        threads = worker_threads([shape.workers for shape in shapes], os.cpu_count() or 1)
        launcher: Launcher = LocalLauncher(name, gpu_ids, threads)
        if config.ray is not None:
            workers = [shape.workers for shape in shapes]
            launcher = RayLauncher(config.ray, workers, args.model, args.kv_cache_memory_bytes)
        self._cluster = Cluster(name, config, secret, engine_argv, shapes, launcher)
        self._secret = secret
        self._engine_argv = engine_argv
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        self._exit_code = 0
        self._left = config.instances

    async def run(self) -> int:
        """Serve until a signal; returns the exit code."""
        loop = asyncio.get_running_loop()
        self._take_signals(loop)
        starting = asyncio.create_task(self._start())
        stopping = asyncio.create_task(self._at_once_or_stop())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        try:
            if not starting.done():  # a signal before it was ready
                starting.cancel()
                await asyncio.wait([starting])
                return 0
            await starting  # raises what went wrong
            await self._serve()
            return self._exit_code
        finally:
            stopping.cancel()
            await self._cluster.stop()

    def _take_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, self._signalled)

    def _signalled(self) -> None:
        (self._at_once if self._stop.is_set() else self._stop).set()

    async def _at_once_or_stop(self) -> None:
        await self._stop.wait()

    async def _start(self) -> None:
        from kvmig.engines.vllm.config import engine_config
        from kvmig.engines.vllm.front import Outlet, RoutedLLM, apply_ready, decode_outputs
        from kvmig.engines.vllm.server import ApiServer
        from kvmig.gateway.app import MIDDLEWARE, Front
        from kvmig.gateway.ports import Batch
        from kvmig.gateway.router import Router

        loop = asyncio.get_running_loop()
        cluster = asyncio.create_task(self._cluster.start(say))
        try:
            # vLLM reads the model's configuration while the instances load theirs.
            vllm_config = await loop.run_in_executor(
                None, engine_config, vllm_flags.parse(self._engine_argv)
            )
            members = await cluster
        except BaseException:
            cluster.cancel()
            await asyncio.wait([cluster])
            raise
        outlet = Outlet()
        self._front = front = Front(self._gate, self._config.priorities)
        self._router = router = Router(
            f"front-{secrets.token_hex(4)}",
            self._secret,
            self._config,
            outlet,
            lambda payload: Batch((outputs := decode_outputs(payload)).outputs, outputs),
            observer=front.metrics,
        )
        ready = [await router.add_instance(one.instance, one.endpoint) for one in members]
        vllm_config.cache_config.num_gpu_blocks = 0
        apply_ready(vllm_config, ready)
        # What instances report in, see `engines.vllm.load`.
        exchanged = self._config.migration.unit_tokens
        router.block_tokens = exchanged or vllm_config.cache_config.block_size
        self._llm = RoutedLLM(
            vllm_config,
            router,
            outlet,
            len(members),
            log_requests=self._args.enable_log_requests,
            log_stats=not self._args.disable_log_stats,
        )
        names = self._args.served_model_name or [self._args.model]
        self._http = ApiServer(
            self._llm,
            self._args,
            self._sock,
            MIDDLEWARE,
            lambda app: front.attach(app, router, names[0], self._args.api_key or ()),
        )
        await self._http.start()
        self._take_signals(loop)  # vLLM's server has put its own in place
        self._cluster.watch(self._instance_lost)

    async def _serve(self) -> None:
        host, port = self._sock.getsockname()[:2]
        say(f"serving {self._args.model} on http://{host}:{port} (Ctrl-C stops)")
        http = asyncio.create_task(self._http.ended())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((http, stop), return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            await self._drain()
        else:
            stop.cancel()
            self._exit_code = 1
        self._router.give_up("the server stops")
        await self._http.stop(GRACE_S)
        http.cancel()
        self._llm.shutdown()
        await self._router.close()

    async def _drain(self) -> None:
        """Take nothing new; wait for what runs, for the time-out, or for a second signal."""
        self._gate.closed = True
        running = len(self._router.live())
        if running:
            say(f"stopping: {running} requests run, at most {self._config.drain_timeout_s:g} s")
        at_once = asyncio.create_task(self._at_once.wait())
        empty = asyncio.create_task(self._empty())
        await asyncio.wait(
            (at_once, empty),
            timeout=self._config.drain_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for task in (at_once, empty):
            task.cancel()

    async def _empty(self) -> None:
        while self._router.live():  # noqa: ASYNC110 - the end of the last one is no event
            await asyncio.sleep(0.05)

    async def _instance_lost(self, instance: str, how: str) -> None:
        self._left -= 1
        say(f"instance {instance} is gone ({how}), {self._left} of {self._config.instances} left")
        await self._router.remove_instance(instance, crashed=True)
        if self._left == 0 and not self._stop.is_set():
            say("no instance is left, stopping")
            self._router.give_up("no instance is left")
            self._exit_code = 1
            self._stop.set()


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
