"""The screen of `mpsctl top`: a thread queries mpsd periodically, and the screen updates the cells that differ."""

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import DescendantFocus
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from mpsd.cli.cells import cells, cut, padded
from mpsd.cli.render import age, plural
from mpsd.cli.top import picture
from mpsd.cli.top.picture import Entry, Fault, GpuRow, Picture
from mpsd.client import Client
from mpsd.core.errors import MpsdError
from mpsd.core.sanitize import plain

_SORTS: Final = ("HELD", "GRANTED", "THREADS", "USER", "GPU", "PID")
"""The columns to sort by, in the order of the key `s`."""

_COLOURS: Final = {
    **dict.fromkeys(picture.BAD, "bold red"),
    **dict.fromkeys(("ok",), "green"),
    **dict.fromkeys(("idle", "waiting", "unsupported"), "dim"),
    **dict.fromkeys(("held", "draining", "drained", "starting", "stopping", "cooling", "down", "refused"), "yellow"),
}
_FAULT_COLOURS: Final = {"fault": "bold red", "violation": "bold red", "warning": "yellow"}

_FEWEST_ROWS: Final = 5
"""Lines that clients and leases have at least."""
_FEWEST: Final = 3
"""Lines that faults have at least, and GPUs, on a terminal that is too small for all."""
_AROUND: Final = 5
"""Lines of everything else: the headline, two lines of headings, the rule, and the keys."""

_BESIDE: Final = 3
"""Columns of a table's margins and of its scroll bar."""

_LATE: Final = 3.0
"""Seconds without an answer after which the picture is called old, if the interval is shorter."""

_KEYS: Final = """\
Enter       everything about the chosen row
Tab         to the other table: GPUs, or clients and leases
f           all faults, with their remedies
/           show only rows with a text; Esc shows all again
s  <  >     sort by the next or the previous column
M  N        sort by memory, by pid
I           reverse the order
r           release the lease of the row
k           end the client of the row
d  u        drain the control daemon of the row, and resume it
x           reset it: try a failed one again
q           quit

HELD is a client's memory, GRANTED its lease's. UTIL, TEMP and
POWER are the GPU's: NVIDIA reports none of them by client."""


class Page(ModalScreen[None]):
    """A text on top of the screen, until a key closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter,space,question_mark,f", "dismiss", "Close")]
    CSS = """
    Page { align: center middle; }
    Page > VerticalScroll { width: 90%; max-width: 110; height: auto; max-height: 90%; border: round $primary;
        padding: 0 1; background: $surface; }
    """

    def __init__(self, title: str, text: str | Text) -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        """Show the text."""
        with VerticalScroll() as box:
            box.border_title, box.border_subtitle = self._title, "Esc closes"
            yield Static(self._text, markup=False)


class Confirmation(ModalScreen[bool]):
    """A question that is answered with y or n."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
    ]
    CSS = """
    Confirmation { align: center middle; }
    Confirmation > VerticalScroll { width: 70; height: auto; max-height: 90%; border: round $warning; padding: 0 1;
        background: $surface; }
    """

    def __init__(self, question: str, consequence: str) -> None:
        """`consequence` describes the effect of the answer yes."""
        super().__init__()
        self._question, self._consequence = question, consequence

    def compose(self) -> ComposeResult:
        """Show the question."""
        with VerticalScroll():
            yield Static(f"{self._question}\n\n{self._consequence}\n\n(y) yes   (n) no", markup=False)

    def action_answer(self, answer: bool) -> None:  # noqa: FBT001 - Textual's signature
        """Close the question with this answer."""
        self.dismiss(answer)


class Lines(Static):
    """A text that is drawn again only when it changes."""

    def __init__(self, name: str) -> None:
        """`name` is the widget's id."""
        super().__init__(id=name, markup=False)
        self._text = Text()

    def write(self, text: Text) -> None:
        """Show a text."""
        if self._text != text or self._text.spans != text.spans:
            self._text = text
            self.update(text)


class Rows(DataTable[Text]):
    """A table whose cursor stays on its row while the rows change."""

    def __init__(self, name: str, moved: Callable[[], None]) -> None:
        """`name` is the widget's id; `moved` is called when other rows are on the screen."""
        super().__init__(id=name, cursor_type="row", zebra_stripes=False)
        self._moved = moved
        self._keys: list[str] = []
        self._headings: list[str] = []
        self._widths: list[int] = []

    def write(self, keys: list[str], headings: list[str], texts: list[list[str]]) -> None:
        """Show these rows; cells that did not change are not drawn again."""
        widths = [max(map(cells, column)) for column in zip(headings, *texts, strict=True)]
        if (headings, widths, keys) == (self._headings, self._widths, self._keys):
            for key, row in zip(keys, texts, strict=True):
                for heading, cell in zip(headings, row, strict=True):
                    if self.get_cell(key, heading).plain != cell:
                        self.update_cell(key, heading, _cell(cell))
            return
        chosen, top = self.chosen, self.scroll_y
        self.clear(columns=True)
        for heading, width in zip(headings, widths, strict=True):
            self.add_column(heading, key=heading, width=width)
        for key, row in zip(keys, texts, strict=True):
            self.add_row(*map(_cell, row), key=key)
        self._keys, self._headings, self._widths = keys, headings, widths
        if chosen in keys:
            self.move_cursor(row=keys.index(chosen), scroll=False)
            self.scroll_to(y=top, animate=False)

    def on_resize(self) -> None:
        """Other rows may be on the screen."""
        self._moved()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Likewise."""
        super().watch_scroll_y(old_value, new_value)
        self._moved()

    @property
    def chosen(self) -> str | None:
        """The key of the row under the cursor."""
        return self._keys[self.cursor_row] if 0 <= self.cursor_row < len(self._keys) else None

    @property
    def visible_rows(self) -> tuple[int, int]:
        """The numbers of the first and the last row on the screen, from 1."""
        first, height = round(self.scroll_y), max(self.size.height - 1, 0)
        return first + 1, min(first + height, len(self._keys))


def _cell(text: str) -> Text:
    return Text(text, style=_COLOURS.get(text, ""))


class Top(App[None]):
    """The live table."""

    TITLE = "mpsctl top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark,h,f1", "keys", "Keys", key_display="?"),
        Binding("f", "faults", "Faults"),
        Binding("slash,f4", "filter", "Filter", key_display="/"),
        Binding("s,greater_than_sign,f6", "sort(1)", "Sort", key_display="s"),
        Binding("less_than_sign", "sort(-1)", show=False),
        Binding("M", "sort_by('HELD')", show=False),
        Binding("N", "sort_by('PID')", show=False),
        Binding("I", "reverse", show=False),
        Binding("r", "release", "Release"),
        Binding("k,f9", "end", "End", key_display="k"),
        Binding("d", "operate('drain')", "Drain"),
        Binding("u", "operate('resume')", show=False),
        Binding("x", "operate('reset')", "Reset"),
        Binding("escape", "clear", show=False),
        Binding("q,f10", "quit", "Quit", key_display="q"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]
    CSS = """
    Lines { height: auto; }
    #rule, #gpu-rule { color: $text-muted; height: 1; }
    DataTable { scrollbar-size-vertical: 1; overflow-x: hidden; }
    #gpus { height: auto; }
    #rows { height: 1fr; }
    .stale DataTable { opacity: 60%; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    """

    def __init__(self, api: Client, every: float) -> None:
        """Query `api` at this interval, in seconds."""
        super().__init__(ansi_color=True)
        self._api, self._every = api, every
        self._headline, self._faults = Lines("headline"), Lines("faults")
        self._gpu_rule, self._rule = Lines("gpu-rule"), Lines("rule")
        self._gpus, self._table = Rows("gpus", self._write_rule), Rows("rows", self._write_rule)
        self._filter = Input(id="filter", placeholder="show only rows with this text; Enter keeps it, Esc clears it")
        self._asking = threading.Lock()
        self._commands: dict[tuple[int, str], str] = {}
        self._picture: Picture | None = None
        self._error: MpsdError | None = None
        self._shown: list[Entry] = []
        self._sort, self._reverse, self._text = 0, False, ""

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield from (self._headline, self._faults, self._gpus, self._gpu_rule, self._rule, self._table, self._filter)
        yield Footer()

    def on_mount(self) -> None:
        """Begin the queries."""
        self._gpus.show_cursor = False
        self._table.focus()
        self.look()
        self.set_interval(self._every, self.look)
        self.set_interval(min(self._every, 1.0), self._write_headline)

    # -- asking -------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Query mpsd in a thread, unless an answer is still awaited."""
        if self._asking.acquire(blocking=False):
            self.run_worker(self._ask, thread=True)

    def _ask(self) -> None:
        try:
            taken = picture.take(self._api, self._commands)
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
        self._error = error
        self._write_headline()

    # -- showing ------------------------------------------------------------------------------------------------------

    def _show(self, taken: Picture) -> None:
        self._picture, self._error = taken, None
        self._arrange()

    def on_resize(self) -> None:
        """Choose the columns anew."""
        self._arrange()

    def _arrange(self) -> None:
        """Update all of the screen, with the rows sorted and filtered."""
        taken = self._picture
        if taken is None or not self._table.is_mounted:
            return
        width, body = self.size.width, self.size.height - _AROUND
        lines = min(_wanted(taken.faults), max(body - len(taken.gpus) - _FEWEST_ROWS, _FEWEST))
        most = max(body - lines - _FEWEST_ROWS, _FEWEST)
        self._write_headline()
        self._faults.display = bool(taken.faults)
        self._faults.write(_fault_lines(taken.faults, width, lines))
        gpus = picture.gpus_shown(taken.gpus, most)
        self._gpus.write([each.cells[0] for each in gpus], *picture.gpu_rows(gpus, width - _BESIDE))
        self._gpus.styles.height = min(len(gpus), most) + 1
        self._gpu_rule.display = len(gpus) > most
        self._gpu_rule.write(
            Text(f"{most} of {len(gpus)} GPUs, those with a fault first; Tab and the arrows show more")
        )
        self._shown = picture.arranged(taken.entries, sort=_SORTS[self._sort], text=self._text, reverse=self._reverse)
        self._table.write([each.key for each in self._shown], *picture.rows(self._shown, width - _BESIDE))
        self.call_after_refresh(self._write_rule)

    def _write_headline(self) -> None:
        """Show whether the node is healthy, and the time of the picture; without an answer, its age and the reason."""
        taken, now = self._picture, datetime.now(UTC)
        if not self.screen_stack:
            return  # an answer that comes while the program ends
        if taken is None:
            if self._error is not None:
                self._headline.write(Text(_said(self._error), style="bold red"))
            return
        is_late = (now - taken.at).total_seconds() > max(_LATE, 2 * self._every)
        is_old = self._error is not None or is_late
        self.screen_stack[0].set_class(is_old, "stale")
        if is_old:
            # Without the hint, which would take lines from what the reader still has.
            said = plain(self._error.detail) if self._error is not None else "mpsd does not answer"
            old = f"OLD: what follows is of {taken.time}, {age(taken.at.isoformat(), now)} ago; {said}"
            self._headline.write(Text(old, style="bold red reverse"))
            return
        room = max(self.size.width - cells(taken.time) - 1, 1)
        left = padded(cut(taken.headline, room), room)
        self._headline.write(Text.assemble((left, "bold green" if taken.healthy else "bold red"), " ", taken.time))

    def _write_rule(self) -> None:
        """Show what the rows are, how many of them there are, and which of them are on the screen."""
        taken = self._picture
        if taken is None:
            return
        leases = {each.lease["id"]: each.lease for each in taken.entries if each.lease is not None}
        waiting = sum(each["wait"] is not None for each in leases.values())
        parts = [
            plural(sum(each.client is not None for each in taken.entries), "client"),
            plural(len(leases), "lease") + (f" ({waiting} waiting)" if waiting else ""),
            *filter(None, (taken.others,)),
        ]
        if self._text:
            parts.append(f"{plural(len(self._shown), 'row')} with {plain(self._text)}")
        first, last = self._table.visible_rows
        if self._shown and (first > 1 or last < len(self._shown)):
            parts.append(f"rows {first}-{last} of {len(self._shown)}")
        order = f"by {_SORTS[self._sort].lower()}{', reversed' if self._reverse else ''}"
        self._rule.write(Text("; ".join([", ".join(parts), order])))

    # -- the chosen row -----------------------------------------------------------------------------------------------

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        """Show the cursor of the GPUs only where the keys move it."""
        if isinstance(event.widget, Rows):
            self._gpus.show_cursor = event.widget is self._gpus

    def _chosen(self) -> Entry | None:
        return next((each for each in self._shown if each.key == self._table.chosen), None)

    def _chosen_gpu(self) -> GpuRow | None:
        gpus = self._picture.gpus if self._picture is not None else ()
        return next((each for each in gpus if each.cells[0] == self._gpus.chosen), None)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show everything about a row."""
        gpu, entry = self._chosen_gpu(), self._chosen()
        if event.data_table is self._gpus and gpu is not None:
            self.push_screen(Page(f"GPU {gpu.cells[0]}", "\n".join(gpu.details)))
        elif event.data_table is self._table and entry is not None:
            self.push_screen(Page("client" if entry.client else "lease", "\n".join(picture.whole(entry))))

    # -- keys ---------------------------------------------------------------------------------------------------------

    def action_keys(self) -> None:
        """Show the keys."""
        self.push_screen(Page("Keys", _KEYS))

    def action_faults(self) -> None:
        """Show all faults, with their remedies."""
        faults = self._picture.faults if self._picture is not None else ()
        self.push_screen(Page(picture.count(faults) or "no fault", _in_full(faults) if faults else "no fault"))

    def action_sort(self, step: int) -> None:
        """Sort by the next column, or by the one before."""
        self._sort = (self._sort + step) % len(_SORTS)
        self._arrange()

    def action_sort_by(self, heading: str) -> None:
        """Sort by a column."""
        self._sort = _SORTS.index(heading)
        self._arrange()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._reverse = not self._reverse
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

    # -- acting -------------------------------------------------------------------------------------------------------

    def action_release(self) -> None:
        """Release the lease of the chosen row, once that is confirmed."""
        chosen = self._chosen()
        if chosen is None or chosen.lease is None:
            self._refuse("this row has no lease")
            return
        lease = chosen.lease
        clients = ", ".join(map(str, lease["clients"]))
        stays = (
            f"Its clients run on, without a lease: {clients}. The key k ends one." if clients else "It has no client."
        )
        act = partial(self._api.release, lease["id"])
        self._confirm(f"Release {picture.lease_in_words(lease)}?", stays, f"{lease['id']} is released", act)

    def action_end(self) -> None:
        """End the client of the chosen row, once that is confirmed."""
        chosen = self._chosen()
        if chosen is None or chosen.client is None:
            self._refuse("this row has no client; r releases a lease")
            return
        pid = chosen.client["pid"]
        stays = "Its server ends its work on the GPU first, so that other clients are not harmed."
        act = partial(self._api.end_client, pid)
        self._confirm(f"End {picture.client_in_words(chosen)}?", stays, f"process {pid} is being ended", act)

    def action_operate(self, verb: str) -> None:
        """Operate the control daemon of the chosen row, or of the chosen GPU, once that is confirmed."""
        chosen = self._chosen_gpu() if self.focused is self._gpus else self._chosen()
        if chosen is None or chosen.daemon is None or self._picture is None:
            self._refuse("this row has no control daemon; Tab leads to the GPUs")
            return
        daemon = chosen.daemon
        effect = {
            "drain": f"It admits no client until: mpsctl resume {daemon} (key u).",
            "resume": "It admits clients again, and a drain is cancelled.",
            "reset": "Its deaths and the reports of its GPU are forgotten, and a failed one starts again.",
        }[verb]
        request = {"timeout": None} if verb == "drain" else None
        act = partial(self._api.operate, daemon, verb, request)
        question = f"{verb.capitalize()} {daemon}, with {picture.load_of(self._picture, daemon)}?"
        self._confirm(question, effect, f"{verb} of {daemon}: accepted", act)

    def _refuse(self, why: str) -> None:
        self.notify(why, severity="warning", markup=False)

    def _confirm(self, question: str, effect: str, done: str, act: Callable[[], object]) -> None:
        def answered(is_wanted: bool | None) -> None:  # noqa: FBT001 - Textual's signature
            if is_wanted:
                self.run_worker(partial(self._act, done, act), thread=True)

        self.push_screen(Confirmation(question, effect), answered)

    def _act(self, done: str, act: Callable[[], object]) -> None:
        self._asking.acquire()  # a connection carries one request at a time
        try:
            act()
        except MpsdError as error:
            said, severity = _said(error), "error"
        else:
            said, severity = done, "information"
        finally:
            self._answered()
        self.call_from_thread(self.notify, said, severity=severity, markup=False)
        self.call_from_thread(self.look)


def _said(error: MpsdError) -> str:
    return f"{plain(error.detail)} ({plain(error.hint)})" if error.hint else plain(error.detail)


def _wanted(faults: Sequence[Fault]) -> int:
    """Return the lines that show all faults with their remedies."""
    return 2 * len(faults)


def _fault_lines(faults: Sequence[Fault], width: int, lines: int) -> Text:
    """Return the faults in at most this many lines: with their remedies, or without, or the first ones."""
    has_remedies = _wanted(faults) <= lines
    shown = faults if len(faults) <= lines else faults[: lines - 1]
    text = Text(no_wrap=True)
    for each in shown:
        text.append(cut(each.because, width) + "\n", _FAULT_COLOURS[each.word])
        if has_remedies:
            text.append(cut(f"  -> {each.remedy}", width) + "\n")
    if rest := faults[len(shown) :]:
        text.append(cut(f"and {len(rest)} more ({picture.count(rest)}): f shows all", width) + "\n", "bold reverse")
    text.right_crop(1)
    return text


def _in_full(faults: Sequence[Fault]) -> Text:
    """Return all faults with their remedies."""
    parts = [part for each in faults for part in ((each.because, _FAULT_COLOURS[each.word]), f"\n  -> {each.remedy}\n")]
    return Text.assemble(*parts)


def run(api: Client, every: float) -> None:
    """Show the table until it is quit."""
    Top(api, every).run()
