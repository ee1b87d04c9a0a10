"""The command that opens a shell under a lease."""

import os

import click

from mpsd.cli.command import environment, note, with_api
from mpsd.cli.commands.admit import take, with_request
from mpsd.cli.leases import calling_process, start
from mpsd.cli.render import percent, size
from mpsd.cli.signals import SignalledError
from mpsd.cli.terminal import shell as user_shell
from mpsd.cli.users import User, variables_of
from mpsd.client import Api
from mpsd.core.errors import NotPermittedError


@click.command()
@with_request
@with_api
def shell(api: Api, wait: float, owner: User | None, **request: object) -> None:
    """Open a shell under a lease: what it starts has the lease's environment, and its prompt shows the lease.

    \b
        mpsctl shell --fraction 0.25

    The shell is the one that SHELL names, or with --user that user's; it holds the lease, which ends with it. With
    --wait, Ctrl-C gives up the place in the queue.
    """  # noqa: D301 - click knows by that character what not to wrap
    if owner is not None and os.geteuid() != 0:
        raise NotPermittedError("only root can open a shell of another user", hint="use sudo mpsctl shell --user")
    try:
        lease = take(api, {**request, "owner": owner}, wait=wait)
    except SignalledError as signal:
        signal.end()
    with start.released_on_failure(api, lease):
        found = calling_process.environment()
        if owner is not None:
            found["SHELL"] = variables_of(owner["uid"])["SHELL"]
        command, more = user_shell.interactive(lease["id"], environment(api, lease, share=0), found)
        gpus = ", ".join(each["daemon"].removeprefix("gpu") for each in lease["shares"])
        threads, memory = lease["active_thread_percentage"] or 0.0, lease["pinned_device_mem_limit"] or 0
        note(f"{lease['id']}: {percent(threads)} and {size(memory)} on GPU {gpus}, until you leave this shell")
        start.become(api, lease, command, owner=owner, more=more)
