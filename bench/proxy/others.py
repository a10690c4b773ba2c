"""Proxies of others, as programs before one upstream."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from bench.load import process

Make = Callable[[int, str, Path], AbstractContextManager[list[int]]]
"""Starts a proxy at a port, for an upstream at a path or port; gives its processes."""
START_S = 120.0
NGINX = """\
user {user}; worker_processes {workers}; worker_rlimit_nofile 131072; daemon off;
pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 65536; }}
http {{
  access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream up {{ server unix:{path}; }}
  server {{ listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://up; proxy_http_version 1.1; proxy_buffering off; }} }}
}}
"""
LITELLM = "1.106.0"
"""1.106.10, 1.108.2 and 1.109.1 want a certifi that was not on PyPI when this was written."""
LITELLM_ENVIRONMENT = {
    "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR", "LITELLM_TELEMETRY": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks for one outside
    # As many connections to its upstream as there are streams.
    "AIOHTTP_CONNECTOR_LIMIT": "0", "AIOHTTP_CONNECTOR_LIMIT_PER_HOST": "0",
}  # fmt: skip


@contextmanager
def running(
    words: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program, and all that it starts."""
    with (folder / "log").open("ab") as log:
        one = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=environment
        )
    try:
        yield one
    finally:
        one.terminate()
        try:
            one.wait(process.END_S)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()


def wait_for(port: int, folder: Path) -> None:
    """Until somebody takes connections."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port)):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise RuntimeError((folder / "log").read_text()[-2000:]) from None
            time.sleep(0.1)


def nginx(program: str, workers: int) -> Make:
    """Started for an upstream at a path."""

    @contextmanager
    def make(port: int, upstream: str, folder: Path) -> Iterator[list[int]]:
        user = getpass.getuser()
        text = NGINX.format(user=user, workers=workers, folder=folder, path=upstream, port=port)
        (folder / "nginx.conf").write_text(text)
        words = [program, "-p", str(folder), "-c", str(folder / "nginx.conf")]
        with running(words, folder) as one:
            wait_for(port, folder)
            yield [one.pid, *process.descendants(one.pid)]

    return make


def install_litellm(folder: Path) -> str:
    """LiteLLM's proxy in a virtual environment there, made unless it is there; its program.

    Raises subprocess.CalledProcessError, with what pip said in its `output`.
    """
    program = folder / "bin" / "litellm"
    done = folder / f"litellm-{LITELLM}"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        words = ["install", "--quiet", "--only-binary=:all:", f"litellm[proxy]=={LITELLM}"]
        subprocess.run(
            [folder / "bin" / "pip", *words],
            check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        done.touch()
    return str(program)


def litellm(program: str, key: str) -> Make:
    """Started for an upstream at a port, without a database. key: the only one that it takes."""

    @contextmanager
    def make(port: int, upstream: str, folder: Path) -> Iterator[list[int]]:
        served = {
            "model": "text-completion-openai/count",
            "api_base": f"http://127.0.0.1:{upstream}/v1",
            "api_key": "none",
        }
        config = {
            "model_list": [{"model_name": "count", "litellm_params": served}],
            "general_settings": {"master_key": key},
        }
        file = folder / "litellm.yaml"
        file.write_text(json.dumps(config))  # which is YAML, too
        words = [
            program, "--config", str(file), "--host", "127.0.0.1", "--port", str(port),
            "--num_workers", "1",
        ]  # fmt: skip
        ours = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        with running(words, folder, {**ours, **LITELLM_ENVIRONMENT}) as one:
            wait_for(port, folder)
            yield [one.pid, *process.descendants(one.pid)]

    return make
