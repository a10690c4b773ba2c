"""The demo on a terminal, in colour, or as plain text where there is none."""

from __future__ import annotations

from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from kvmig_tools.demo.run import Shown

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")


class Screen:
    """Shows the stream, each instance in its colour and each turn on a line of its own."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colours: dict[str, str] = {}
        self._last: str | None = None

    def say(self, text: str) -> None:
        """One line of ours."""
        self._console.print(Text(text, style="dim"))

    def show(self, instance: str, text: str) -> None:
        """More of the stream."""
        colour = self._colour(instance)
        if instance != self._last:
            start = "" if self._last is None else "\n"
            self._put(f"{start}{instance} ", f"bold reverse {colour}" if colour else "")
            self._put(" ", "")
            self._last = instance
        self._put(text, colour)

    def end(self) -> None:
        """The stream is over."""
        self._console.print("\n")

    def table(self, shown: Shown) -> None:
        """A line for each migration."""
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        for column in ("migration", "first token", "gap", "blocks sent", "there already", "KiB"):
            justify: JustifyMethod = "left" if column == "migration" else "right"
            table.add_column(column, justify=justify, no_wrap=True)
        for report in shown.reports:
            table.add_row(*self._row(shown, report))
        self._console.print(table)
        gap = shown.ledger.usual_gap() * 1e3
        self._console.print(
            f"\n{len(shown.ledger)} tokens, {committed(shown)} migrations; the usual gap between "
            f"two tokens: {gap:.1f} ms (median)"
        )

    def verdict(self, equal: bool) -> None:
        """Whether the moved text is the unmoved one."""
        if equal:
            self._console.print(Text("The text equals the unmoved run's.", style="bold green"))
        else:
            self._console.print(Text("The text DIFFERS from the unmoved run's.", style="bold red"))

    def _row(self, shown: Shown, report: dict[str, Any]) -> list[Text]:
        turn = Text.assemble(
            (report["source"], self._colour(report["source"])),
            " → ",
            (report["destination"], self._colour(report["destination"])),
        )
        if report["state"] != "committed":
            turn.append(f" {report['state']}: {report['reason']}")
            return [turn]
        token = report["output_tokens"]
        gap = shown.ledger.gap(token)
        blocks = sum(stage["blocks"] for stage in report["stages"]) + report["tail_blocks"]
        return [
            turn,
            Text(str(token)),
            Text("" if gap is None else f"{gap * 1e3:.1f} ms"),
            Text(str(blocks)),
            Text(str(report["hit_blocks"])),
            Text(f"{report['bytes'] / 1024:,.0f}"),
        ]

    def _colour(self, instance: str) -> str:
        return self._colours.setdefault(instance, COLOURS[len(self._colours) % len(COLOURS)])

    def _put(self, text: str, style: str) -> None:
        self._console.print(Text(text, style=style), end="", soft_wrap=True)


def committed(shown: Shown) -> int:
    """How many of the migrations moved the stream."""
    return sum(report["state"] == "committed" for report in shown.reports)
