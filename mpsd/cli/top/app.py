"""The screen of `mpsctl top`: a thread queries mpsd periodically, and the screen updates the cells that differ."""

import threading
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from mpsd.cli.render import plural
from mpsd.cli.top import picture
from mpsd.cli.top.picture import Entry, Picture
from mpsd.client import Api
from mpsd.core.errors import MpsdError
from mpsd.core.sanitize import plain

_SORTS: Final = ("GPU", "THREADS", "HELD", "GRANTED", "USER", "PID")
"""The columns to sort by, in the order of the key `s`."""

_COLOURS: Final = {"violation": "red", "unknown": "yellow", "idle": "dim"}
_MOST_GPUS: Final = 8
"""Lines of GPUs, so that a small terminal has room for the table."""


class Confirmation(ModalScreen[bool]):
    """A question that is answered with y or n."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
    ]
    CSS = """
    Confirmation { align: center middle; }
    Confirmation > Vertical { width: 70; height: auto; border: round $warning; padding: 1 2; background: $surface; }
    """

    def __init__(self, question: str, consequence: str) -> None:
        """`consequence` describes the effect of the answer yes."""
        super().__init__()
        self._question, self._consequence = question, consequence

    def compose(self) -> ComposeResult:
        """Show the question."""
        with Vertical():
            yield Static(f"{self._question}\n\n{self._consequence}\n\n(y) yes   (n) no", markup=False)

    def action_answer(self, answer: bool) -> None:  # noqa: FBT001 - Textual's signature
        """Close the question with this answer."""
        self.dismiss(answer)


class Lines(Static):
    """A text that is drawn again only when it changes."""

    def __init__(self, name: str) -> None:
        """`name` is the widget's id."""
        super().__init__(id=name, markup=False)
        self._text = ""

    def write(self, text: str) -> None:
        """Show a text."""
        if self._text != text:
            self._text = text
            self.update(text)


class Top(App[None]):
    """The live table."""

    TITLE = "mpsctl top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("r", "release", "Release"),
        Binding("d", "drain", "Drain"),
        Binding("escape", "clear", "Clear", show=False),
    ]
    CSS = """
    #node { height: auto; max-height: 3; }
    #gpus { height: auto; max-height: 10; margin: 1 0; }
    #rule { color: $text-muted; }
    DataTable { height: 1fr; }
    #filter { display: none; height: 1; border: none; }
    """

    def __init__(self, api: Api, every: float) -> None:
        """Query `api` at this interval, in seconds."""
        super().__init__(ansi_color=True)
        self._api, self._every = api, every
        self._lines = {name: Lines(name) for name in ("node", "gpus", "rule")}
        self._table = DataTable[Text](cursor_type="row", zebra_stripes=False)
        self._filter = Input(id="filter", placeholder="show only rows with this text; Enter keeps it, Esc clears it")
        self._asking = threading.Lock()
        self._picture: Picture | None = None
        self._shown: list[Entry] = []
        self._headings: list[str] = []
        self._sort = 0
        self._text = ""

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield from self._lines.values()
        yield self._table
        yield self._filter
        yield Footer()

    def on_mount(self) -> None:
        """Begin the queries."""
        self._table.focus()
        self.look()
        self.set_interval(self._every, self.look)

    # -- asking -------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Query mpsd in a thread, unless an answer is still awaited."""
        if self._asking.acquire(blocking=False):
            self.run_worker(self._ask, thread=True)

    def _ask(self) -> None:
        try:
            taken = picture.take(self._api)
        except MpsdError as error:
            self._api.close()
            self.call_from_thread(self._fail, error)
        else:
            self.call_from_thread(self._show, taken)
        finally:
            self._answered()

    def _answered(self) -> None:
        """Let the next request begin; at the end of the program there is none, and the connection is closed."""
        if not self.is_running:
            self._api.close()  # the request may have opened it again
        self._asking.release()

    def _fail(self, error: MpsdError) -> None:
        """Show why there is no answer; the old content stays, and the next interval tries again."""
        self._lines["node"].write(f"{plain(error.detail)} ({plain(error.hint or '')}); what follows is old")

    # -- showing ------------------------------------------------------------------------------------------------------

    def _show(self, taken: Picture) -> None:
        self._picture = taken
        self._lines["node"].write(taken.headline)
        self._arrange()

    def _arrange(self) -> None:
        """Update the table, sorted and filtered; unchanged cells are not drawn again."""
        if self._picture is None or not self._table.is_mounted:
            return
        self._lines["gpus"].write(picture.gpus(self._picture, self.size.width, _MOST_GPUS))
        entries = picture.arranged(self._picture.entries, sort=_SORTS[self._sort], text=self._text)
        headings, texts = picture.rows(entries, self.size.width - 2)
        counts = f"{plural(sum(each.is_client for each in entries), 'client')}, {plural(len(entries), 'row')}"
        chosen = f", with {plain(self._text)}" if self._text else ""
        self._lines["rule"].write(f"{counts}, by {_SORTS[self._sort].lower()}{chosen}")
        table = self._table
        keys = [each.key for each in entries]
        if headings != self._headings or keys != [each.key for each in self._shown]:
            self._fill(table, headings, entries, texts)
        else:
            for row, cells in enumerate(texts):
                for place, cell in enumerate(cells):
                    if table.get_cell(keys[row], headings[place]).plain != cell:
                        table.update_cell(keys[row], headings[place], _cell(headings[place], cell), update_width=True)
        self._shown, self._headings = entries, headings

    def _fill(
        self, table: "DataTable[Text]", headings: list[str], entries: list[Entry], texts: list[list[str]]
    ) -> None:
        """Fill the table anew, with the cursor where it was."""
        chosen = self._chosen()
        table.clear(columns=True)
        for heading in headings:
            table.add_column(heading, key=heading)
        for entry, cells in zip(entries, texts, strict=True):
            table.add_row(*map(_cell, headings, cells), key=entry.key)
        keys = [each.key for each in entries]
        if chosen is not None and chosen.key in keys:
            table.move_cursor(row=keys.index(chosen.key))

    def on_resize(self) -> None:
        """Choose the columns anew."""
        self._arrange()

    def _chosen(self) -> Entry | None:
        """Return the row under the cursor."""
        number = self._table.cursor_row
        return self._shown[number] if 0 <= number < len(self._shown) else None

    # -- keys ---------------------------------------------------------------------------------------------------------

    def action_sort(self) -> None:
        """Sort by the next column."""
        self._sort = (self._sort + 1) % len(_SORTS)
        self._arrange()

    def action_filter(self) -> None:
        """Open the line for the filter."""
        self._filter.display = True
        self.set_focus(self._filter)

    def action_clear(self) -> None:
        """Close the line, and show every row."""
        self._text = ""
        self._filter.value = ""
        self._close_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the rows that contain the text that was typed so far."""
        self._text = event.value
        self._arrange()

    def on_input_submitted(self) -> None:
        """Close the line; the filter stays."""
        self._close_filter()

    def _close_filter(self) -> None:
        self._filter.display = False
        self.set_focus(self._table)
        self._arrange()

    def action_release(self) -> None:
        """Release the lease of the chosen row, once that is confirmed."""
        chosen = self._chosen()
        if chosen is None or chosen.lease is None:
            self.notify("this row has no lease", severity="warning", markup=False)
            return
        lease = chosen.lease
        self.push_screen(
            Confirmation(f"Release {lease}?", "Its clients run on, without a lease."),
            partial(self._do, f"{lease} is released", partial(self._api.release, lease)),
        )

    def action_drain(self) -> None:
        """Drain the control daemon of the chosen row, once that is confirmed."""
        chosen = self._chosen()
        if chosen is None:
            return
        daemon = chosen.daemon
        self.push_screen(
            Confirmation(f"Drain {daemon}?", f"It admits no client until: mpsctl resume {daemon}"),
            partial(self._do, f"{daemon} is draining", partial(self._api.operate, daemon, "drain", {"timeout": None})),
        )

    def _do(self, done: str, act: Callable[[], object], is_wanted: bool | None) -> None:  # noqa: FBT001 - Textual's
        if is_wanted:
            self.run_worker(partial(self._act, done, act), thread=True)

    def _act(self, done: str, act: Callable[[], object]) -> None:
        self._asking.acquire()  # a connection carries one request at a time
        try:
            act()
        except MpsdError as error:
            said, severity = f"{plain(error.detail)}: {plain(error.hint or '')}", "error"
        else:
            said, severity = done, "information"
        finally:
            self._answered()
        self.call_from_thread(self.notify, said, severity=severity, markup=False)
        self.call_from_thread(self.look)


def _cell(heading: str, text: str) -> Text:
    return Text(text, style=_COLOURS.get(text, "") if heading == "VERDICT" else "")


def run(api: Api, every: float) -> None:
    """Show the table until it is quit."""
    Top(api, every).run()
