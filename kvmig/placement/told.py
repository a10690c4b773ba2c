"""Waves and what they are worth, for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvmig.placement.moves import GIB, PlanStep, PlanWave, seconds
from kvmig.placement.worth import MARGIN, PlanWorth


def way_to_text(waves: Sequence[PlanWave]) -> str:
    """The plan in words: a line in all, and one for each wave."""
    if not waves:
        return "nothing moves"
    steps = [step for wave in waves for step in wave.steps]
    loaded = sum(one.size for one in steps if one.kind == "start") / GIB
    moved = sum(one.size for one in steps if one.kind in ("drain", "move")) / GIB
    count = f"{len(waves)} wave" + "s" * (len(waves) > 1)
    lines = [
        f"{count}, {seconds(waves):.1f} s: {loaded:.3g} GiB of weights are loaded, "
        f"{moved:.3g} GiB of KV cache moves"
    ]
    lines += [wave_to_text(number, wave) for number, wave in enumerate(waves, 1)]
    return "\n".join(lines)


def wave_to_text(number: int, wave: PlanWave) -> str:
    """The steps of a wave in one line."""
    steps = "; ".join(step_to_text(one) for one in wave.steps)
    return f"  wave {number}, {wave.seconds:.1f} s: {steps}"


def step_to_text(step: PlanStep) -> str:
    """A step in words."""
    to = ", ".join(f"{size / GIB:.3g} GiB to {unit}" for unit, size in step.to)
    match step.kind:
        case "start":
            size = f"{step.size / GIB:.3g} GiB of weights"
            return f"{step.model} starts in {step.unit} ({size}, {step.quota / GIB:.3g} GiB for KV)"
        case "drain":
            return f"{step.model} drains from {step.unit} ({to or 'it is empty'})"
        case "gap":
            return f"{step.model} ends in {step.unit} before it serves elsewhere"
        case "move":
            return f"requests of {step.model} leave {step.unit} ({to})"
        case "quota":
            share = "" if step.share == 1 else f" and {step.share:.0%} of the SMs"
            return f"{step.model} has {step.quota / GIB:.3g} GiB for KV{share} in {step.unit}"


def worth_to_text(one: PlanWorth, horizon_s: float) -> str:
    """The verdict and its reasons."""
    verdict = "worth it" if one.it else "not worth it"
    return (
        f"{verdict}: in {horizon_s:g} s it serves {one.gained:.4g} requests more, and the way "
        f"there delays {one.delayed:.4g} ({MARGIN:g} times as many must be gained)"
    )
