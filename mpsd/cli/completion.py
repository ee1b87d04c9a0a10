"""What the shell offers after Tab: the names that a running mpsd knows. Whatever goes wrong, it offers nothing."""

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeAlias

import click

from mpsd.cli.api import Api
from mpsd.core.errors import MpsdError
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_DEADLINE: Final = 0.5
"""Seconds for mpsd to answer: who pressed Tab waits for it."""

_Names: TypeAlias = Callable[[Api], Iterable[tuple[str, str | None]]]
"""Asks mpsd for names, each with what to say beside it."""


def _offering(names: _Names) -> Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]:
    """Make a completion of the names that mpsd gives; none where it is not there, answers late, or nothing usable."""

    def offer(context: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        given = context.find_root().params
        api = Api(given["socket"], trusted=given["trusted"]) if context.obj is None else context.obj
        try:
            with api.another(deadline=_DEADLINE) as api_now:
                found = [(plain(name), plain(text)) for name, text in names(api_now)]
        except (MpsdError, LookupError, TypeError, ValueError):
            return []
        return [CompletionItem(name, help=text) for name, text in found if name.startswith(incomplete)]

    return offer


daemon_names: Final = _offering(lambda api: [(each["name"], each["state"]) for each in api.daemons()["daemons"]])
gpu_names: Final = _offering(lambda api: [(f"{each['index']}", each["name"]) for each in api.gpus()["gpus"]])
lease_names: Final = _offering(lambda api: [(each["id"], each["name"]) for each in api.leases()["leases"]])


def program(context: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Offer the programs in PATH for the first word of a command; paths, and its arguments, the shell knows about."""
    from click.shell_completion import CompletionItem

    if context.params.get("command") or "/" in incomplete or not incomplete:
        return [CompletionItem(incomplete, type="file")]
    found = {
        each
        for directory in os.get_exec_path()
        for each in _listed(directory)
        if each.startswith(incomplete) and os.access(os.path.join(directory, each), os.X_OK)  # noqa: PTH118 - as below
    }
    return [CompletionItem(each) for each in sorted(found)] or [CompletionItem(incomplete, type="file")]


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208 - pathlib takes longer to import
    except OSError:
        return []
