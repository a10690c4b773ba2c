"""Enacts what the real Scaler decides: instances that start, drain and leave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvmig.controlplane.scaling import InstanceScaler, ScaleIn, ScaleOut
from kvmig.controlplane.view import ClusterView
from kvmig.core.config import ScalingConfig
from kvmig_tools.sim.events import EventQueue
from kvmig_tools.sim.llumlet import SimLlumlet


class Scaling:
    """Instances by the Scaler's word. They cost from the decision until they have left."""

    def __init__(
        self,
        config: ScalingConfig,
        events: EventQueue,
        start_s: float,
        order: Callable[[], str],
        serve: Callable[[str], None],
        leave: Callable[[str], None],
    ) -> None:
        """order: a new member that doesn't serve yet; serve, leave: its name."""
        self._scaler = InstanceScaler(config)
        self._events = events
        self._start_s = start_s
        self._order = order
        self._serve = serve
        self._leave = leave

    def decide(self, view: ClusterView, members: dict[str, SimLlumlet]) -> None:
        """Once a round, with those that serve or drain."""
        for name, one in list(members.items()):
            if one.state == "draining" and one.idle:
                self._leave(name)
        decision = self._scaler.decide(view)
        match decision:
            case ScaleOut(count):
                for _ in range(count):
                    self._events.after(self._start_s, partial(self._serve, self._order()))
            case ScaleIn(instance):
                members[instance].state = "draining"
