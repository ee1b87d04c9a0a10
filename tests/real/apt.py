"""What the programs here share that bring things from Debian: apt's mirrors, and running a program to its end."""

import os
import subprocess
from pathlib import Path
from typing import Final

SECONDS: Final = 600.0


class FetchError(Exception):
    """Something did not come, and the message says why."""


def run(*command: str, config: Path | None = None, cwd: Path | None = None) -> str:
    """Run a program and return what it printed; raise FetchError with the end of what it said when it fails."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    if config is not None:
        environment["APT_CONFIG"] = str(config)
    try:
        done = subprocess.run(
            command, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise FetchError(f"{command[0]} is not on this machine: it takes Debian, or one of its children") from error
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{' '.join(command)}: no end after {SECONDS} s") from error
    if done.returncode != 0:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise FetchError(f"{' '.join(command)}: {'; '.join(said[-4:]) or f'status {done.returncode}'}")
    return done.stdout


def mirrors() -> list[str]:
    """Return the mirrors of Debian itself that this machine's apt is configured with, the likeliest first."""
    targets = run("apt-get", "indextargets", "--format", "$(LABEL)|$(REPO_URI)", "Created-By: Packages")
    labels = {uri: label for label, uri in (line.split("|", 1) for line in targets.splitlines())}
    if not labels:  # apt tells its targets only once it has lists; before that, what it would update says as much
        planned = run("apt-get", "update", "--print-uris").splitlines()
        labels = {line[1:].split("/dists/")[0] + "/": "" for line in planned if "/dists/" in line}
    usable = [uri for uri, label in labels.items() if "security" not in f"{uri} {label}".lower()]
    if not usable:
        raise FetchError("this machine's apt has no mirror of Debian configured (see `apt-get update --print-uris`)")
    return sorted(usable, key=lambda uri: labels[uri] != "Debian" and not uri.endswith("/debian/"))
