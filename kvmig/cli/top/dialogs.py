"""The dialogs of `kvmig top`. All text is shown as it is, without markup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

STYLE = """
{name} {{ align: center middle; }}
{name} Vertical {{
    width: 72; max-width: 95%; height: auto; max-height: 90%; padding: 1 2;
    background: $surface; border: round $primary;
}}
{name} Static {{ margin-bottom: 1; }}
{name} OptionList {{ height: auto; max-height: 12; }}
"""

KEYS = """\
up, down    another row                  Tab    the next table
/           only rows with these words   Escape all rows, or leave a dialog
s, r        another order, reversed      1 2 3  streams, migrations, GPUs
d, u        drain the instance under the cursor, let it serve again
m           move the stream under the cursor to another instance
q           quit; what runs goes on

A stream that moves shows its instances as i0 → i1, and for 5 s after it as i1 ← i0."""


class ConfirmDialog(ModalScreen[bool]):
    """Asks before an order: True for yes."""

    DEFAULT_CSS = STYLE.format(name="ConfirmDialog")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
    ]

    def __init__(self, question: str, meaning: str) -> None:
        """meaning: what will happen; empty: the question has it."""
        super().__init__()
        self._question = question
        self._meaning = meaning

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(self._question, markup=False)
            if self._meaning:
                yield Static(self._meaning, markup=False)
            yield Static("y  yes        n  no", markup=False)

    def action_answer(self, yes: bool) -> None:
        """Close the dialog with an answer."""
        self.dismiss(yes)


class ChoiceDialog(ModalScreen[int | None]):
    """Lets one of several lines be chosen: its number from 0 on, or None."""

    DEFAULT_CSS = STYLE.format(name="ChoiceDialog")
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Leave")]

    def __init__(self, title: str, choices: Sequence[str]) -> None:
        super().__init__()
        self._title = title
        self._choices = choices

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(self._title, markup=False)
            yield OptionList(*(Option(Text(one)) for one in self._choices))
            yield Static("Enter  move        Escape  leave it where it is", markup=False)

    @on(OptionList.OptionSelected)
    def _choose(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_index)

    def action_leave(self) -> None:
        """Close the dialog without a choice."""
        self.dismiss(None)


class HelpDialog(ModalScreen[None]):
    """What the keys do."""

    DEFAULT_CSS = STYLE.format(name="HelpDialog")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter", "leave", "Leave")
    ]

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(KEYS, markup=False)

    def action_leave(self) -> None:
        """Close the dialog."""
        self.dismiss(None)
