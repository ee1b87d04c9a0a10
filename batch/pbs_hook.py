"""A hook of PBS Professional or OpenPBS that gives jobs with the resource `mps` leases of mpsd.

NOT RUN: it was written from the "PBS Professional Hooks Guide", and no PBS has run it. docs/batch.md says how to
install it. One hook is for three events:

    execjob_begin   root, on each node of the job: takes a claim for the job's user
    execjob_launch  root, before each task: the task gets the lease's environment; without a lease it is rejected
    execjob_end     root, after the job's processes: ends the lease with its clients

PBS runs hooks in a Python of its own, so this uses `mpsctl`, and no library.
"""

import json
import os
import subprocess

import pbs

MPSCTL = "/usr/bin/mpsctl"
STATE = "/run/mpsd-pbs"
SECONDS = 30
"""How long mpsctl may take. PBS ends a hook after its own `alarm`, of 30 seconds by default: set a greater one."""


def mpsctl(*arguments):
    """Return the output of mpsctl. Raises subprocess.SubprocessError and OSError."""
    command = [MPSCTL, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=SECONDS, stdin=subprocess.DEVNULL).stdout


def path_of(job):
    """Return the file with the lease of a job: PBS gives no id twice while the job is known."""
    return os.path.join(STATE, job.id.replace("/", "_"))


def begin(job):
    """Take a claim: PBS knows the job's processes only later, and mpsd takes whoever has the token for them."""
    share = job.Resource_List["mps"]
    if not share:
        return
    user = job.euser or job.Job_Owner.split("@")[0]
    said = mpsctl(
        "admit", "--fraction", f"{int(share) / 100:g}", "--claim", "--user", user, "--name", f"pbs-{job.id}",
        "--label", f"pbs/job={job.id}", "-o", "json",
    )  # fmt: skip
    os.makedirs(STATE, mode=0o700, exist_ok=True)
    with open(path_of(job), "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(said)


def launch(event, job):
    """Have the task run as `mpsctl claim`, which takes the lease and becomes the task."""
    if not job.Resource_List["mps"]:
        return
    try:
        with open(path_of(job), "rb") as file:
            lease = json.load(file)
    except FileNotFoundError:
        event.reject(f"mpsd: job {job.id} has no lease: the mom's log has the reason of execjob_begin")
    for name, value in lease["env"].items():
        event.env[name] = value
    event.argv = [MPSCTL, "claim", lease["id"], "--", event.progname, *list(event.argv)[1:]]
    event.progname = MPSCTL


def end(job):
    """End the lease; a job without one, and one that has ended, are no errors."""
    try:
        with open(path_of(job), "rb") as file:
            lease = json.load(file)["id"]
        os.unlink(path_of(job))
        mpsctl("release", lease)
    except FileNotFoundError:
        pass


def main():
    """Run the part for the event; only `launch` may reject, and only its own task."""
    event = pbs.event()
    try:
        if event.type == pbs.EXECJOB_BEGIN:
            begin(event.job)
        elif event.type == pbs.EXECJOB_LAUNCH:
            launch(event, event.job)
        elif event.type == pbs.EXECJOB_END:
            end(event.job)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        pbs.logmsg(pbs.LOG_WARNING, f"mpsd: {error}")
    event.accept()


main()
