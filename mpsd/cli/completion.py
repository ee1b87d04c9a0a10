"""Completions for the shell: the names that a running mpsd has. On any failure, there are none."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import click

from mpsd.client import Api
from mpsd.core.errors import MpsdError
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_DEADLINE: Final = 0.5
"""Seconds for mpsd's answer: the user waits for it after pressing Tab."""

_Names: TypeAlias = Callable[[Api], Iterable[tuple[str, str | None]]]
"""Queries mpsd for names, each with a description."""


def _offering(names: _Names) -> Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]:
    """Make a completion with names from mpsd; it is empty where mpsd is absent, late, or gives an unusable answer."""

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
    """Offer the programs in PATH for the first word of a command; the shell completes paths and arguments."""
    from click.shell_completion import CompletionItem

    if context.params.get("command") or "/" in incomplete or not incomplete:
        return [CompletionItem(incomplete, type="file")]
    found = {
        each.name
        for directory in os.get_exec_path()
        for each in _listed(Path(directory))
        if each.name.startswith(incomplete) and os.access(each, os.X_OK)
    }
    return [CompletionItem(each) for each in sorted(found)] or [CompletionItem(incomplete, type="file")]


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []
