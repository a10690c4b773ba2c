"""Writes costs of models on a device in the format of `kvmig.placement`. Pure."""

from __future__ import annotations

import msgspec

from kvmig.core.errors import ConfigError
from kvmig.placement.step_costs import DeviceCosts, ModelCost


def with_model(before: DeviceCosts | None, device: DeviceCosts, name: str) -> DeviceCosts:
    """The device with the models of a file that is there, and `name` as it was just measured.

    Raises ConfigError where the file is of another device, or was measured otherwise.
    """
    if before is None:
        return device
    for field in ("name", "memory_bytes"):
        was, now = getattr(before, field), getattr(device, field)
        if was != now:
            raise ConfigError(f"the file is of another device: {field} is {was}, must be {now}")
    models = {**before.models, name: _joined(before.models.get(name), device.models[name])}
    return msgspec.structs.replace(
        device,
        models=models,
        instance_bytes=max(before.instance_bytes, device.instance_bytes),
    )


def _joined(before: ModelCost | None, now: ModelCost) -> ModelCost:
    """Sizes as they are now; step times on other numbers of GPUs stay."""
    return now if before is None else msgspec.structs.replace(now, tp={**before.tp, **now.tp})


def to_toml(device: DeviceCosts) -> str:
    """The file; `kvmig.placement.step_costs.load` reads the same device from it."""
    lines = [
        "# Measured by `python -m kvmig_tools.profile --shares`. kvmig/placement/step_costs.py has"
        " the formulas.",
        f"name = {_text(device.name)}",
        f"source = {_text(device.source)}",
        f"memory_bytes = {device.memory_bytes}",
        f"bandwidth = {device.bandwidth:.4g}",
        f"usable = {device.usable:g}",
        f"instance_bytes = {device.instance_bytes}",
    ]
    for name, model in device.models.items():
        lines += [
            "",
            f"[models.{_text(name)}]",
            f"weight_bytes = {model.weight_bytes}",
            f"token_bytes = {model.token_bytes}",
        ]
        for size, cost in sorted(model.tp.items(), key=lambda one: int(one[0])):
            errors = cost.errors
            lines += [
                "",
                f"[models.{_text(name)}.tp.{size}]",
                f"prefill = {_numbers(cost.prefill)}",
                f"decode = {_numbers(cost.decode)}",
                f"errors = {{ prefill = {_numbers(errors.prefill)}, decode ="
                f" {_numbers(errors.decode)} }}",
            ]
    return "\n".join(lines) + "\n"


def _text(word: str) -> str:
    return msgspec.json.encode(word).decode()


def _numbers(values: tuple[float, ...]) -> str:
    return f"[{', '.join(f'{one:.6g}' for one in values)}]"
