"""vLLM's flags that take JSON: what each of them may be, checked as soon as it is read.

vLLM checks some of them where it makes its configuration, and others where it uses them: there
Python complains of a list that has no items.
"""

from __future__ import annotations

import json
from argparse import Action
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

OBJECT = 'must be a JSON object, such as {"NAME": VALUE}'
TEXTS = 'must be a JSON list of strings, such as ["*"]'
ADAPTER = 'must be NAME=PATH, or a JSON object such as {"name": NAME, "path": PATH}'
DEVICES = 'must be a device such as cpu, or a JSON object such as {"cuda:1": "cuda:0"}'

_LISTS = frozenset({"allowed_origins", "allowed_methods", "allowed_headers"})
_ADAPTERS = "lora_modules"
_DEVICES = "pt_load_map_location"


def reads_json(action: Action) -> bool:
    """Whether a flag takes JSON: its reader is Python's or pydantic's of JSON, or calls one."""
    return action.dest == _ADAPTERS or _calls_json(action.type, 2)


def _calls_json(read: Any, depth: int) -> bool:
    """depth: of functions that enclose others."""
    if read is json.loads:
        return True
    code = getattr(read, "__code__", None)
    if code is None:
        return False
    if not {"json", "validate_json"}.isdisjoint(code.co_names):
        return True
    enclosed = [cell.cell_contents for cell in read.__closure__ or ()]
    return depth > 0 and any(_calls_json(one, depth - 1) for one in enclosed)


def why_unfit(action: Action, text: str, value: object) -> str:
    """What a flag that takes JSON must be instead; empty: `text`, read as `value`, is fit.

    `null` is as if the flag were not given, where vLLM has no value for it then.
    """
    if action.dest == _ADAPTERS:
        return "" if _is_adapter(text) else ADAPTER
    if action.dest in _LISTS:
        is_fit = isinstance(value, list) and all(isinstance(one, str) for one in value)
        return "" if is_fit else TEXTS
    if isinstance(value, Mapping) or is_dataclass(value):
        return ""
    if action.dest == _DEVICES:
        return "" if _is_device(text) else DEVICES
    return "" if value is None and action.default is None and text.strip() else OBJECT


def _is_adapter(text: str) -> bool:
    if "=" in text and "," not in text:
        return all(text.split("=", 1))
    try:
        given = json.loads(text)
    except ValueError:
        return False
    if not isinstance(given, dict):
        return False
    return all(isinstance(given.get(name), str) and given[name] for name in ("name", "path"))


def _is_device(text: str) -> bool:
    import torch

    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True
