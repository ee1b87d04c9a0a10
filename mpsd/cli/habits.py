"""The words and options of other tools, and what is meant by them here.

A word that only asks for a look never leads to a command that changes something.
"""

from typing import Final, NamedTuple

from mpsd.cli.examples import EXAMPLES


class Habit(NamedTuple):
    """What words of other tools mean."""

    words: str
    alone: str
    """The command, where the word stands alone."""
    of: str = ""
    """The command with the words that follow in the place of {}; empty: the same."""


LOOKS: Final = (
    Habit("get ls list queue squeue qstat jobs", "mpsctl leases", "mpsctl show {}"),
    Habit("info describe inspect state health", "mpsctl status", "mpsctl explain {}"),
    Habit("sinfo node nodes", "mpsctl status"),
    Habit("ps process processes procs pids smi nvidia-smi", "mpsctl clients"),
    Habit("free avail available room capacity", "mpsctl gpus", "mpsctl release {}"),
    Habit("log logs journal dmesg history", "mpsctl events", "mpsctl explain {}"),
    Habit("sacct report stats accounting", "mpsctl usage", "mpsctl usage --user {}"),
    Habit("user users who whoami", "mpsctl usage --by user", "mpsctl leases --user {}"),
    Habit("watch monitor nvtop nvitop htop", "mpsctl top"),
    Habit("ui gui page dashboard", "mpsctl web"),
    Habit("diagnose debug test", "mpsctl doctor"),
    Habit("version", "mpsctl --version"),
    Habit("set settings conf configure quota quotas limit limits", "mpsctl config"),
)
"""Words of people who want to see something."""

ENDS: Final = Habit(
    "kill cancel scancel qdel rm del delete remove stop abort terminate", "mpsctl release LEASE", "mpsctl release {}"
)
"""The end of a lease, or of a process where a number follows."""

CHANGES: Final = (
    ENDS,
    Habit(
        "srun exec execute launch submit sbatch qsub with", EXAMPLES["mpsctl run"], "mpsctl run --fraction 0.25 -- {}"
    ),
    Habit("start", "systemctl start mpsd", "mpsctl run --fraction 0.25 -- {}"),
    Habit("alloc salloc allocate reserve request create new take acquire bash sh login", EXAMPLES["mpsctl shell"]),
    Habit("pause cordon disable suspend lock", "mpsctl hold DAEMON", "mpsctl hold {}"),
    Habit("unpause uncordon enable unlock undrain unhold", "mpsctl resume DAEMON", "mpsctl resume {}"),
    Habit("unban forgive", "mpsctl pardon USER", "mpsctl pardon {}"),
    Habit("install setup", "mpsctl service install"),
    Habit("uninstall", "mpsctl service uninstall"),
)
"""Words of people who want to change something."""

OF_DAEMONS: Final = ("hold", "drain", "resume", "restart", "reset")
"""The commands on control daemons."""

OF_DAEMON: Final = {"start": "resume", "stop": "drain"}
"""What starts and stops a control daemon here."""

OF_SYSTEMD: Final = ("start", "stop", "restart", "enable", "disable")
"""What systemd does to mpsd's service, where it is typed for `mpsd` or `mpsctl service`."""

OPTIONS: Final = {
    "--version": "-v -V",
    "--label": "-l",
    "-o json": "--json --yaml -j",
    "-o csv": "--csv",
    "-o wide": "-l -v --verbose --wide",
    "--output": "--format",
    "--all": "-a -A",
    "--user": "-u --uid --owner",
    "--mine": "--me",
    "--name": "-n -J --job-name",
    "--last": "--tail --lines",
    "--memory": "-m --mem --gpu-memory --vram",
    "--ttl": "-t --time --time-limit",
    "--timeout": "-t --time",
    "--timeout 0": "--now --force",
    "--fraction": "-f --share --frac",
    "--threads": "--percent --percentage --sm",
    "--gpu": "-g --gpu-id --device",
    "--gpus": "--num-gpus --ngpus",
    "--wait": "--block --timeout",
    "--only": "--check",
    "--every": "--interval",
    "--watch": "--interval",
}
"""Options, and those of other tools that mean them where the command has them; the first one counts."""

ABSENT: Final = frozenset({"--cpus", "-c", "--host", "--bind", "--listen"})
"""Options of other tools for what mpsd does not have, however near to one of its options."""

NAMES: Final = frozenset({"--gpu", "--daemon", "--lease", "--name", "--id", "-g", "-d", "-n"})
"""Options for what is an argument here."""

VALUES: Final = {
    "--fraction": "0.25",
    "--threads": "25",
    "--memory": "8GiB",
    "--gpu": "0",
    "--gpus": "2",
    "--processes": "2",
    "--priority": "0",
    "--wait": "10m",
    "--ttl": "2h",
    "--timeout": "1h",
    "--claim-deadline": "1m",
    "--every": "2s",
    "--watch": "2s",
    "-w": "2s",
    "--pid": "$$",
    "--label": "team=vision",
    "--name": "train",
    "--daemon": "gpu0",
    "--canary": "gpu0",
    "--sort": "memory",
    "--since": "2h",
    "--until": "1h",
    "--last": "20",
    "-n": "20",
    "--by": "user",
    "--kind": "lease_*",
    "-k": "lease_*",
    "--port": "8080",
    "--connections": "2",
    "--simulate": "2",
}
"""A valid value of each option that has a notation of its own."""

HINTS: Final = {
    **{f"mpsctl {verb}": f"mpsctl {verb} DAEMON; their names: mpsctl daemons" for verb in OF_DAEMONS},
    "mpsctl end": "mpsctl end PID; the pids: mpsctl clients",
    "mpsctl release": "mpsctl release LEASE; the leases: mpsctl leases --mine",
    "mpsctl pardon": "mpsctl pardon USER; the quarantined: mpsctl status",
}
"""The hints of commands that change what they name, by their paths: a hint names nothing that may exist."""

TOO_MANY: Final = {
    "mpsctl leases": "mpsctl show {}",
    "mpsctl gpus": "mpsctl explain {}",
    "mpsctl daemons": "mpsctl explain {}",
    "mpsctl status": "mpsctl explain {}",
    "mpsctl events": "mpsctl explain {}",
    "mpsctl clients": "mpsctl clients --user {}",
    "mpsctl usage": "mpsctl usage --user {}",
    "mpsctl doctor": "mpsctl doctor --list",
    "mpsctl config": "mpsctl config | grep {}",
    "mpsctl shell": "mpsctl run --fraction 0.25 -- {}",
    "mpsctl admit": "mpsctl run --fraction 0.25 -- {}",
    "mpsd check": "mpsd check --config {}",
    "mpsd run": "mpsctl run --fraction 0.25 -- {}",
}
"""By the path of a command that takes no argument, or fewer: what is meant with one; any other is for one at a time."""

ELSEWHERE: Final = {
    ("mpsctl release", "--all"): "mpsctl release $(mpsctl leases --mine -o name)",
    ("mpsctl top", "-w"): "mpsctl top --every 2s",
    ("mpsd", "--simulate"): EXAMPLES["mpsd run"],
    **dict.fromkeys(
        (("mpsd demo", each) for each in ("--gpu", "--gpus", "--simulate")), "mpsd run --root /tmp/mpsd --simulate 4"
    ),
}
"""Options that a command does not have, and the way to the same end."""
