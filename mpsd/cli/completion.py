"""What the shell offers after Tab: the names that a running mpsd knows. Whatever goes wrong, it offers nothing."""

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


def program(_: click.Context, __: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Leave it to the shell, which knows about files."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]
