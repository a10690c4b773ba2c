"""Step times of models on a share of a GPU's SMs, and what models hold there. Pure.

A device is a TOML file with the fields of `DeviceCosts`; kvmig/placement has those that come with
kvmig. Sizes in bytes, times in seconds, shares in (0, 1]; the coefficients in a file are
milliseconds.
"""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import msgspec

from kvmig.core.errors import ConfigError

Coefficient = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
SATURATED = 1.67
"""1 / share up to which a decode step's constant part doesn't grow: 60 % of the SMs."""


class FitErrors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a fit is off the measured times: median and 90th percentile, in percent."""

    prefill: tuple[float, float]
    decode: tuple[float, float]


class StepCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model on `tp` GPUs. With x = 1 / share, n and T in thousands of tokens:

    prefill = p0 + n (p1 x + p2) + p3 (sum of squared prompt lengths) / 1e6
    decode = d0 + d1 max(0, x - 1.67) + B (d2 + d3 x) + T (d4 + d5 x)
    """

    prefill: tuple[Coefficient, Coefficient, Coefficient, Coefficient]
    decode: tuple[Positive, Coefficient, Coefficient, Coefficient, Coefficient, Coefficient]
    errors: FitErrors

    def prefill_s(self, tokens: float, squares: float, share: float) -> float:
        """Seconds of one job; squares: the sum of its prompts' squared lengths."""
        p0, p1, p2, p3 = self.prefill
        return (p0 + tokens / 1e3 * (p1 / share + p2) + p3 * squares / 1e6) / 1e3

    def decode_line(self, share: float) -> tuple[float, float, float]:
        """Seconds of a step: (constant, a sequence, a token of context)."""
        x = 1 / share
        d0, d1, d2, d3, d4, d5 = self.decode
        return (
            (d0 + d1 * max(0.0, x - SATURATED)) / 1e3,
            (d2 + d3 * x) / 1e3,
            (d4 + d5 * x) / 1e6,
        )

    def decode_s(self, sequences: float, context: float, share: float) -> float:
        """Seconds of one step of `sequences` that hold `context` tokens together."""
        constant, sequence, token = self.decode_line(share)
        return constant + sequence * sequences + token * context


class ModelCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model on one kind of device."""

    weight_bytes: Annotated[int, msgspec.Meta(gt=0)]
    """Bytes of the weights, over all GPUs together."""
    token_bytes: Annotated[int, msgspec.Meta(gt=0)]
    """KV cache of one token, all layers and heads."""
    tp: dict[str, StepCost]
    """Step times by tensor-parallel size; TOML's keys are text."""

    def cost_on(self, gpus: int) -> StepCost | None:
        """Step times on `gpus` GPUs; None: they were not measured."""
        return self.tp.get(str(gpus))

    @property
    def sizes(self) -> list[int]:
        """GPUs on which it may run, ascending."""
        return sorted(int(one) for one in self.tp)


class DeviceCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of GPU, and the models that were measured on it."""

    name: str
    source: str
    """The source of the figures."""
    memory_bytes: Annotated[int, msgspec.Meta(gt=0)]
    bandwidth: Positive
    """Bandwidth of its memory, bytes per second."""
    usable: Annotated[float, msgspec.Meta(gt=0, le=1)]
    """Share of the memory that engines may take."""
    instance_bytes: Annotated[int, msgspec.Meta(ge=0)]
    """Bytes of an instance besides weights and KV cache: activations, graphs, contexts."""
    models: dict[str, ModelCost]

    def memory(self, gpus: int) -> float:
        """Bytes that `gpus` of it give to weights, instances and KV cache."""
        return self.usable * self.memory_bytes * gpus

    def fixed_bytes(self, model: str) -> int:
        """Bytes that an instance of `model` takes before its first token of KV cache."""
        return self.models[model].weight_bytes + self.instance_bytes

    def alone_s(self, model: str, prompt: float, output: float) -> float:
        """Seconds of one request on an empty instance, all SMs, the fewest GPUs it runs on.

        This is what an SLO's scale multiplies (MuxServe, section 4).
        """
        one = self.models[model]
        cost = one.tp[str(one.sizes[0])]
        constant, sequence, token = cost.decode_line(1.0)
        step = constant + sequence + token * (prompt + output / 2)
        return cost.prefill_s(prompt, prompt**2, 1.0) + max(0.0, output - 1) * step


def known() -> list[str]:
    """Names of the devices that come with kvmig."""
    folder = files("kvmig.placement").iterdir()
    return sorted(one.name.removesuffix(".toml") for one in folder if one.name.endswith(".toml"))


def load(name: str) -> DeviceCosts:
    """A device by name, or from a .toml file. Raises ConfigError that names what is wrong."""
    if name.endswith(".toml"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"device {name} can't be read: {error}") from error
    elif name in known():
        text = files("kvmig.placement").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    else:
        raise ConfigError(
            f"device is {name!r:.100}, must be {' or '.join(known())} or a .toml file"
        )
    try:
        device = msgspec.toml.decode(text, type=DeviceCosts)
    except msgspec.DecodeError as error:
        raise ConfigError(f"device {name}: {error}") from error
    return _checked(device)


def _checked(device: DeviceCosts) -> DeviceCosts:
    for model, one in device.models.items():
        wrong = [size for size in one.tp if not size.isdecimal() or int(size) < 1]
        if wrong or not one.tp:
            raise ConfigError(
                f"device {device.name}: models.{model}.tp has {wrong or 'no entry'}, "
                "must have numbers of GPUs"
            )
        for size, cost in one.tp.items():
            if not all(map(math.isfinite, (*cost.prefill, *cost.decode))):
                raise ConfigError(
                    f"device {device.name}: models.{model}.tp.{size} has an infinite coefficient"
                )
    return device
