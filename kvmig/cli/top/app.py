"""The application of `kvmig top`: tables that follow a server, and orders with a key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import ClassVar, NamedTuple

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane

from kvmig.cli.client import CallFailure
from kvmig.cli.top import table_rows
from kvmig.cli.top.dialogs import ChoiceDialog, ConfirmDialog, HelpDialog
from kvmig.cli.top.plain_text import middle, plain
from kvmig.cli.top.sources import LiveSource
from kvmig.cli.top.table_rows import Key, Look, SortOrder, TableRow
from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.live_records import LiveFleet, LiveInstance, LiveStream

LOOK_S = 1.0
"""Pause between two looks."""
STYLES: dict[Look, str] = {
    "": "",
    "title": "bold",
    "dim": "dim",
    "good": "green",
    "wait": "yellow",
    "bad": "red",
    "moving": "bold cyan",
}
MOST_ROOM = "the instance with the most room"

Rows = Callable[[LiveFleet, str, SortOrder], list[TableRow]]
Order = Callable[[], Awaitable[str]]
"""Gives an order; returns what has become of it, for the user. Raises CallFailure."""


class TableKind(NamedTuple):
    """A table, and what it shows."""

    id: str
    title: str
    columns: Sequence[str]
    sorts: Sequence[str]
    rows: Rows


INSTANCES = TableKind(
    "instances",
    "Instances",
    table_rows.INSTANCE_COLUMNS,
    table_rows.INSTANCE_SORTS,
    table_rows.instance_rows,
)
STREAMS = TableKind(
    "streams",
    "Streams",
    table_rows.STREAM_COLUMNS,
    table_rows.STREAM_SORTS,
    table_rows.stream_rows,
)
MOVES = TableKind(
    "moves",
    "Migrations",
    table_rows.MOVE_COLUMNS,
    table_rows.MOVE_SORTS,
    table_rows.move_rows,
)
DEVICES = TableKind(
    "gpus",
    "GPUs",
    table_rows.DEVICE_COLUMNS,
    table_rows.DEVICE_SORTS,
    table_rows.device_rows,
)
TABS = (STREAMS, MOVES, DEVICES)
KINDS = {one.id: one for one in (INSTANCES, *TABS)}


class LiveTable(DataTable[Text]):
    """A table whose rows come and go; the cursor stays on its row."""

    def __init__(self, kind: TableKind) -> None:
        super().__init__(id=kind.id, cursor_type="row", zebra_stripes=False)
        self.kind = kind
        self.order = SortOrder(kind.sorts[0])
        self._keys: list[Key] = []
        self._shown: list[TableRow] = []

    def on_mount(self) -> None:
        for name in self.kind.columns:
            self.add_column(name, key=name)

    @property
    def chosen(self) -> Key | None:
        """The key of the row under the cursor; None: there is none."""
        at = self.cursor_row
        return self._keys[at] if 0 <= at < len(self._keys) else None

    def show_rows(self, rows: Sequence[TableRow]) -> None:
        """Show these; only what is different is drawn again."""
        if rows == self._shown:
            return
        keys = [one.key for one in rows]
        if keys == self._keys:
            self._change_cells(rows)
        else:
            self._replace_rows(rows)
        self._keys, self._shown = keys, list(rows)

    def _change_cells(self, rows: Sequence[TableRow]) -> None:
        for at, (before, row) in enumerate(zip(self._shown, rows, strict=True)):
            for column, (old, new) in enumerate(zip(before.cells, row.cells, strict=True)):
                if old != new or before.look != row.look:
                    self.update_cell_at((at, column), cell(new, row.look), update_width=True)  # type: ignore[arg-type]

    def _replace_rows(self, rows: Sequence[TableRow]) -> None:
        chosen, at, scroll = self.chosen, self.cursor_row, self.scroll_y
        self.clear()
        for row in rows:
            self.add_row(*(cell(one, row.look) for one in row.cells))
        keys = [one.key for one in rows]
        if chosen in keys:
            at = keys.index(chosen)
        self.move_cursor(row=min(at, max(0, len(rows) - 1)), animate=False, scroll=False)
        self.scroll_to(y=scroll, animate=False)

    def show_order(self) -> None:
        """Mark the column by which the table is sorted."""
        for name, column in self.columns.items():
            mark = ""
            if self.order.by in (name.value, "name" if name.value == self.kind.columns[0] else ""):
                mark = " ▴" if self.order.reverse else " ▾"
            column.label = Text(f"{name.value}{mark}")
        self.refresh()


def cell(text: str, look: Look) -> Text:
    """A cell as it is drawn; the text is taken as it is, without markup."""
    return Text(text, style=STYLES[look], no_wrap=True, end="")


class TopApp(App[None]):
    """The application. `run` it, or drive it by a test's Pilot."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "kvmig top"
    CSS = """
    Screen { layout: vertical; }
    #summary, #last { height: 1; padding: 0 1; }
    #summary { background: $panel; }
    #summary.away { background: $error; color: $text; }
    #last { color: $text-muted; }
    #instances { height: 1fr; min-height: 6; }
    TabbedContent { height: 1fr; min-height: 6; }
    TabPane { padding: 0; }
    #filter { height: 1; border: none; padding: 0 1; display: none; }
    #filter.open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse", show=False),
        Binding("d", "drain", "Drain"),
        Binding("u", "undrain", "Undrain"),
        Binding("m", "move", "Move"),
        Binding("1", "tab('streams')", "Streams"),
        Binding("2", "tab('moves')", "Moves"),
        Binding("3", "tab('gpus')", "GPUs"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("escape", "clear_filter", "Show all", show=False),
    ]

    def __init__(
        self, source: LiveSource, clock: TimeSource = monotonic, pause_s: float = LOOK_S
    ) -> None:
        """pause_s: between two looks."""
        super().__init__()
        self.source = source
        self.fleet = LiveFleet(at=0.0)
        self._clock = clock
        self._pause_s = pause_s
        self._words = ""
        self._seen_at: float | None = None
        """When a look succeeded; None: none has."""

    def compose(self) -> ComposeResult:
        yield Static("", id="summary", markup=False)
        yield LiveTable(INSTANCES)
        with TabbedContent(id="tabs"):
            for kind in TABS:
                with TabPane(kind.title, id=f"tab-{kind.id}"):
                    yield LiveTable(kind)
        yield Static("", id="last", markup=False)
        yield Input(
            placeholder="words that rows must have; Enter keeps them, Escape shows all", id="filter"
        )
        yield Footer()

    def on_mount(self) -> None:
        for table in self._tables:
            table.show_order()
        self._of(INSTANCES).focus()
        self.run_worker(self._follow(), name="looks", group="looks")

    async def on_unmount(self) -> None:
        await self.source.close()

    # -- looks

    async def _follow(self) -> None:
        """Look again and again, one look at a time."""
        while self.is_running:
            try:
                found = await self.source.observe()
            except CallFailure as error:
                if self.is_running:
                    self._show_away(str(error))
            else:
                if self.is_running:
                    self.fleet, self._seen_at = found, self._clock()
                    self.show_fleet()
            await asyncio.sleep(self._pause_s)

    def show_fleet(self) -> None:
        """Show what the last look has found."""
        top = self._home.query_one("#summary", Static)
        top.remove_class("away")
        top.update(f"{plain(self.source.where, 40)}  {table_rows.summary(self.fleet)}")
        for table in self._tables:
            table.show_rows(table.kind.rows(self.fleet, self._words, table.order))
        self._home.query_one("#last", Static).update(table_rows.last_move(self.fleet))

    def _show_away(self, why: str) -> None:
        top = self._home.query_one("#summary", Static)
        top.add_class("away")
        since = "" if self._seen_at is None else f"{self._clock() - self._seen_at:.0f} s old: "
        top.update(since + plain(why))

    # -- keys

    @property
    def _table(self) -> LiveTable:
        """The table with the focus, else that of the instances."""
        focused = self.focused
        return focused if isinstance(focused, LiveTable) else self._of(INSTANCES)

    @property
    def _home(self) -> Screen[object]:
        """The screen with the tables, also while a dialog is before it."""
        return self.screen_stack[0]

    @property
    def _tables(self) -> Iterable[LiveTable]:
        return self._home.query(LiveTable)

    def _of(self, kind: TableKind) -> LiveTable:
        return self._home.query_one(f"#{kind.id}", LiveTable)

    def action_tab(self, name: str) -> None:
        """Show one of the lower tables."""
        self._home.query_one("#tabs", TabbedContent).active = f"tab-{name}"
        self._of(KINDS[name]).focus()

    def action_sort(self) -> None:
        """Order the table by its next column."""
        table = self._table
        self._order(table, table_rows.next_sort(table.order, table.kind.sorts))

    def action_reverse(self) -> None:
        """Order the table the other way round."""
        table = self._table
        self._order(table, table.order._replace(reverse=not table.order.reverse))

    def _order(self, table: LiveTable, order: SortOrder) -> None:
        table.order = order
        table.show_order()
        self.show_fleet()

    def action_filter(self) -> None:
        """Type words that rows must have."""
        line = self._home.query_one("#filter", Input)
        line.add_class("open")
        line.focus()

    def action_clear_filter(self) -> None:
        """Show all rows."""
        line = self._home.query_one("#filter", Input)
        line.value = ""
        line.remove_class("open")
        self._of(INSTANCES).focus()

    @on(Input.Changed, "#filter")
    def _take_words(self, event: Input.Changed) -> None:
        self._words = event.value
        self.show_fleet()

    @on(Input.Submitted, "#filter")
    def _keep_words(self) -> None:
        if self._words:
            self._of(INSTANCES).focus()
        else:
            self.action_clear_filter()

    def action_help(self) -> None:
        """Show what the keys do."""
        self.push_screen(HelpDialog())

    # -- orders

    def _chosen_instance(self) -> LiveInstance | None:
        key = self._of(INSTANCES).chosen
        for one in self.fleet.instances:
            if (one.model, one.deployment, one.row.id) == key:
                return one
        self.notify("The cursor is on no instance.", severity="warning", markup=False)
        return None

    def _chosen_stream(self) -> LiveStream | None:
        key = self._of(STREAMS).chosen
        for one in self.fleet.streams:
            if (one.model, one.deployment, one.row.id) == key:
                return one
        self.notify("There is no stream under the cursor.", severity="warning", markup=False)
        return None

    def action_drain(self) -> None:
        """Drain the instance under the cursor."""
        if (one := self._chosen_instance()) is None:
            return
        count = one.row.running + one.row.waiting
        question = (
            f"Drain instance {plain(one.row.id, 40)} of model {middle(one.model, 40)},"
            f" which has {count} requests?"
        )

        async def drained() -> str:
            await self.source.drain(one)
            return f"Instance {plain(one.row.id, 40)} is drained."

        self._confirm(question, self.source.drain_means, drained)

    def action_undrain(self) -> None:
        """Let the instance under the cursor serve again."""
        if (one := self._chosen_instance()) is None:
            return
        question = (
            f"Let instance {plain(one.row.id, 40)} of model {middle(one.model, 40)} serve again?"
        )

        async def undrained() -> str:
            await self.source.undrain(one)
            return f"Instance {plain(one.row.id, 40)} serves again."

        self._confirm(question, "", undrained)

    def action_move(self) -> None:
        """Move the stream under the cursor."""
        if (stream := self._chosen_stream()) is None:
            return
        found = table_rows.destinations(self.fleet, stream)
        if not found:
            self.notify("No other instance of its model serves.", severity="warning", markup=False)
            return
        choices = [MOST_ROOM] + [
            f"{plain(one.row.id, 30)}: {one.row.running} run,"
            f" {table_rows.kv_part(one.row):.0%} of its KV cache in use"
            for one in found
        ]
        title = f"Move {middle(stream.row.id, 40)} from {plain(stream.row.instance, 30)} to"

        def answered(at: int | None) -> None:
            if at is not None:
                self._move(stream, found[at - 1].row.id if at else None)

        self.push_screen(ChoiceDialog(title, choices), answered)

    def _move(self, stream: LiveStream, destination: str | None) -> None:
        async def moved() -> str:
            move = await self.source.move(stream, destination)
            reason = f": {move.reason}" if move.reason else ""
            return plain(f"{move.source} → {move.destination} {move.state}{reason}")

        self._carry_out(moved)

    def _confirm(self, question: str, meaning: str, order: Order) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self._carry_out(order)

        self.push_screen(ConfirmDialog(question, meaning), answered)

    def _carry_out(self, order: Order) -> None:
        """Give an order, and notify the user of its end; looks go on meanwhile."""

        async def given() -> None:
            try:
                self.notify(await order(), markup=False)
            except CallFailure as error:
                self.notify(plain(str(error), 400), severity="error", markup=False)

        self.run_worker(given(), group="orders")
