"""`mpsctl job`: MPS for the ranks of one user's job, without root."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from mpsd.cli.command import with_api
from mpsd.cli.job import keeper, launcher, place, rank
from mpsd.cli.job.channel import Channel
from mpsd.cli.leases import caller, start
from mpsd.cli.options import DURATION, MEMORY, THREADS, Single, program
from mpsd.client import Client
from mpsd.core.errors import InvalidRequestError, UnreachableError
from mpsd.core.programs import job as jobs

_JOB: Final = "MPSD_JOB"
"""Names the directory of the job to the ranks below `mpsctl job -- LAUNCHER`."""

_RANK: Final = "MPSD_JOB_RANK"
"""Names its number to the program of a rank: what that starts belongs to the rank."""

_LEASE: Final = "MPSD_LEASE"

_ATTEMPTS: Final = 5
"""How often a rank joins anew, where it met a keeper that was about to end."""


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--processes",
    cls=Single,
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Number of ranks on this node, where the launcher does not say.",
)
@click.option(
    "--threads",
    cls=Single,
    type=THREADS,
    metavar="PERCENT",
    help="Percentage of the GPU's threads that each rank may use, such as 25.  [default: all of them]",
)
@click.option("--share", type=click.Choice(["even"]), help="`even`: each rank gets an equal part of its GPU.")
@click.option(
    "--memory",
    cls=Single,
    type=MEMORY,
    metavar="SIZE",
    help="Device memory that each rank may use, such as 8GiB.  [default: all of it]",
)
@click.option(
    "--gpus",
    cls=Single,
    metavar="all|N|LIST",
    help="The GPUs of the job, of those that CUDA_VISIBLE_DEVICES names: the first N, or a list, such as 0,2 or UUIDs."
    "  [default: all]",
)
@click.option(
    "--within",
    cls=Single,
    type=DURATION,
    metavar="DURATION",
    help="Time in which all ranks must have come and be verified.  [default: 60s]",
)
@click.option(
    "--simulate", cls=Single, type=click.IntRange(1, 64), metavar="N", help="Try it without a GPU: simulate N of them."
)
@click.option("--control", cls=Single, metavar="PROGRAM", help="The control program.  [default: NVIDIA's]")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=program)
@with_api
def job(
    api: Client,
    command: tuple[str, ...],
    *,
    processes: int | None,
    threads: float | None,
    share: str | None,
    memory: int | None,
    gpus: str | None,
    within: float | None,
    simulate: int | None,
    control: str | None,
) -> None:
    """Run a rank of a job, or its launcher, with MPS, without root.

    \b
    Around each rank, or around the launcher:
        srun mpsctl job -- ./app
        mpsctl job -- mpirun -n 8 ./app

    The first rank on a node starts an mpsd of the job's own, which runs MPS on the GPUs that the job may see; the
    others join it, and it ends with the last one. Where an mpsd of the node answers, its leases are used. The ranks of
    a node start together once mpsd has verified a probe of each, or fail together.

    With several GPUs, each rank gets one, so that mpsctl job has to be around each rank; the launcher may have one too:

    \b
        mpsctl job -- mpirun -n 8 mpsctl job -- ./app

    mpsctl passes signals on to COMMAND, and returns its exit status. As in a shell, that is 127 if COMMAND is not
    found, and 126 if it cannot be run. If a rank runs outside MPS, all ranks of the node are ended.
    """  # noqa: D301 - click knows by that character what not to wrap
    if not command[0]:
        raise click.UsageError("COMMAND is empty.")
    if share is not None and (threads is not None or memory is not None):
        raise click.UsageError("--share even gives each rank its part: leave --threads and --memory out.")
    if gpus is not None:
        jobs.check_gpus(gpus, simulate)
    start.check(command)
    options: dict[str, object] = {
        "processes": processes, "threads": threads, "even": True if share else None, "memory": memory, "gpus": gpus,
        "within": within, "simulate": simulate, "control": control,
    }  # fmt: skip
    click.get_current_context().exit(_join(api, command, options))


def _join(api: Client, command: Sequence[str], options: dict[str, object]) -> int:
    """Join the job as a rank, or as the command around the launcher, and return the exit status of the command."""
    variables = caller.environment()
    if _JOB in variables and _RANK in variables:
        start.execute(command, variables)
    seat = launcher.seat(variables)
    for _ in range(_ATTEMPTS):
        inner = variables.get(_JOB)
        connection = None if inner is None else place.connect(Path(inner))
        outer = connection is None and (seat is None or seat.ranks == 1)
        ranks = 1 if outer else _ranks(seat, options)
        given = options if connection is not None else _whole(api, options, variables)
        if connection is None:
            named = f"pid {os.getpid()} {os.urandom(8).hex()}" if outer or seat is None else seat.job
            connection = place.join(place.directory(named, variables), keeper.start)
        request = {
            "outer": outer, "inner": _names_mpsctl(command), "rank": 0 if outer else seat and seat.rank, "ranks": ranks,
            "cpus": sorted(os.sched_getaffinity(0)), "options": given,
        }  # fmt: skip
        channel = Channel(connection)
        try:
            return rank.run(channel, request, command, variables, outer=outer)
        except rank.LostError:
            channel.close()
        except OSError as error:
            start.refuse(command, error)
    raise UnreachableError("the keeper of the job ends again and again", hint="see whether its directory is removed")


def _ranks(seat: launcher.Seat | None, options: dict[str, object]) -> int:
    """Return the number of ranks on this node. Raises InvalidRequestError where nobody says it."""
    given, said = options["processes"], None if seat is None else seat.ranks
    if isinstance(given, int) and said is not None and given != said:
        raise InvalidRequestError(
            f"--processes is {given}, and {seat.launcher if seat else 'the launcher'} starts {said} ranks on this node",
            hint="leave --processes out",
            limit="processes",
        )
    if isinstance(given, int):
        return given
    if said is None:
        raise InvalidRequestError(
            f"{seat.launcher if seat else 'the launcher of this job'} does not say how many ranks are on this node",
            hint="say it: mpsctl job --processes N -- PROGRAM",
            limit="processes",
        )
    return said


def _whole(api: Client, options: dict[str, object], variables: dict[str, str]) -> dict[str, object]:
    """Return the options of a whole job, with what the environment says about it."""
    name = variables.get("SLURM_JOB_NAME") or "job"
    return {
        **options,
        "even": options["even"] or False,
        "gpus": options["gpus"] or "all",
        "within": options["within"] or 60.0,
        "visible": variables.get("CUDA_VISIBLE_DEVICES"),
        "by_bus": variables.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID",
        "socket": api.path,
        "trusted": sorted(api.trusted),
        "lease": variables.get(_LEASE),
        "name": name if name.isprintable() else "job",
    }


def _names_mpsctl(command: Sequence[str]) -> bool:
    """Tell whether a launcher starts its ranks by `mpsctl job`, as far as its command line shows."""
    return "mpsctl job" in " ".join(" ".join(command).split())  # also within `sh -c "... mpsctl job ..."`
