"""The state of the node in one line, for `systemctl status`."""

from typing import Final

from mpsd.core.admission.ledger import Ledger
from mpsd.core.health import NodeHealth
from mpsd.core.lifecycle import State
from mpsd.core.sanitize import plain

_LONGEST: Final = 400
"""Maximum characters of a status: `systemctl status` shows it in one line."""


def status_line(node: NodeHealth, ledger: Ledger, *, reload: str) -> str:
    """Summarise the node for an operator in a line: what is ready, how many leases there are, and what is wrong.

    `reload` is why the last reload was refused.
    """
    ready = sum(each.state is State.READY for each in node.daemons)
    leases = len(ledger.leases)
    held = "1 lease" if leases == 1 else f"{leases} leases"
    parts = [f"{ready} of {len(node.daemons)} control daemons ready, {held}, {len(ledger.waiting)} waiting"]
    parts += [each.because for each in node.reasons]
    count = len(node.violations)
    parts += [f"{count} violation{'s' if count > 1 else ''}: {node.violations[0]}"] if count else []
    parts += [each.because for each in node.warnings]
    parts += [f"reload refused: {reload}"] if reload else []
    line = plain("; ".join(parts))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
