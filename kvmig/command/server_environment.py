"""The environment that a user's server gets. Pure.

The fleet's own environment has secrets: tokens of hubs, keys of clouds, passwords in the URLs of
proxies and of collectors. A server gets what a program needs to run, and what its specification
names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kvmig.core.errors import ConfigError

USUAL = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "CONDA_PREFIX",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_CACHE_PATH",
    "CUDA_MPS_PIPE_DIRECTORY", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TRITON_CACHE_DIR",
    "OPENBLAS_NUM_THREADS", "DBUS_SESSION_BUS_ADDRESS",
})  # fmt: skip
"""Variables that servers get."""
USUAL_BEGINNINGS = ("LC_", "XDG_", "OMP_", "MKL_", "KMP_")
"""Beginnings of further ones."""
OWN = ("KVMIG_", "NOTIFY_SOCKET")
"""Beginnings of the fleet's own, which no server gets."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
MOST_NAMED = 100


def server_environment(
    fleet: Mapping[str, str], named: Sequence[str], gpus: Sequence[str]
) -> dict[str, str]:
    """The environment of a server. fleet: its own. named: further variables that it is to get."""
    found = {name: value for name, value in fleet.items() if _is_usual(name) or name in named}
    if gpus:
        found |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return found


def check_named(where: str, named: Sequence[str]) -> None:
    """Raises ConfigError for names that can't be passed on."""
    if len(named) > MOST_NAMED:
        raise ConfigError(
            f"{where}: pass_environment has {len(named)} names, must have {MOST_NAMED} at most"
        )
    for name in named:
        if VARIABLE.fullmatch(name) is None:
            raise ConfigError(
                f"{where}: pass_environment has {name!r:.200}, must be names of environment"
                " variables of `kvmig up`, such as HF_TOKEN"
            )
        if name.startswith(OWN):
            raise ConfigError(
                f"{where}: pass_environment has {name!r:.200}, which is the fleet's own: no server"
                " gets it"
            )


def _is_usual(name: str) -> bool:
    return name in USUAL or name.startswith(USUAL_BEGINNINGS)
