"""Helpers for programs that download from Debian: apt's mirrors, and running a program to its end."""

import os
import subprocess
from pathlib import Path
from typing import Final

SECONDS: Final = 600.0

KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

_CONFIGURATION: Final = """\
// Read last, so that it wins over this machine's own settings, of which proxies, certificates and logins stay in force.
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
APT::Sandbox::User "{user}";
APT::Architecture "{architecture}";
APT::Architectures "{architecture}";
Acquire::Languages "none";
Acquire::Retries "3";
Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled "false";
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "{folder}/sources";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "{folder}/preferences";
Dir::State "{folder}/state";
Dir::State::Lists "{folder}/lists";
Dir::State::status "/dev/null";
Dir::Cache "{folder}/cache";
Dir::Log "{folder}/log";
"""


class FetchError(Exception):
    """A download failed; the message says why."""


def run(*command: str, config: Path | None = None, cwd: Path | None = None, seconds: float = SECONDS) -> str:
    """Run a program and return its output; raise FetchError with the end of the output when it fails."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    if config is not None:
        environment["APT_CONFIG"] = str(config)
    try:
        done = subprocess.run(
            command, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise FetchError(f"{command[0]} is not on this machine: it takes Debian, or one of its children") from error
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{' '.join(command)}: no end after {seconds} s") from error
    if done.returncode != 0:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise FetchError(f"{' '.join(command)}: {'; '.join(said[-4:]) or f'status {done.returncode}'}")
    return done.stdout


def mirrors() -> list[str]:
    targets = run("apt-get", "indextargets", "--format", "$(LABEL)|$(REPO_URI)", "Created-By: Packages")
    labels = {uri: label for label, uri in (line.split("|", 1) for line in targets.splitlines())}
    if not labels:  # apt lists its targets only once it has lists; before that, the URIs of an update say as much
        planned = run("apt-get", "update", "--print-uris").splitlines()
        labels = {line[1:].split("/dists/")[0] + "/": "" for line in planned if "/dists/" in line}
    usable = [uri for uri, label in labels.items() if "security" not in f"{uri} {label}".lower()]
    if not usable:
        raise FetchError("this machine's apt has no mirror of Debian configured (see `apt-get update --print-uris`)")
    return sorted(usable, key=lambda uri: labels[uri] != "Debian" and not uri.endswith("/debian/"))


def architecture() -> str:
    return run("dpkg", "--print-architecture").strip()


def configuration(
    folder: Path, mirror: str, suite: str, component: str, architecture: str, *, types: str = "deb"
) -> Path:
    """Write an apt configuration with one suite and its own lists; return the file for APT_CONFIG."""
    for name in ("sources", "preferences", "state", "lists/partial", "cache/archives/partial", "log", "apt.conf.d"):
        (folder / name).mkdir(parents=True)
    source = (
        f"Types: {types}\nURIs: {mirror}\nSuites: {suite}\nComponents: {component}\nArchitectures: {architecture}\n"
    )
    if KEYRING.exists():
        source += f"Signed-By: {KEYRING}\n"
    (folder / "sources" / "one.sources").write_text(source, encoding="utf-8")
    parts = Path("/etc/apt/apt.conf.d")
    for part in sorted(parts.iterdir()) if parts.is_dir() else []:
        (folder / "apt.conf.d" / part.name).symlink_to(part)
    user = "root" if os.geteuid() == 0 else ""
    ours = _CONFIGURATION.format(folder=folder, architecture=architecture, user=user)
    (folder / "apt.conf.d" / "zzzz-mpsd-tests").write_text(ours, encoding="utf-8")
    config = folder / "apt.conf"
    config.write_text(f'Dir::Etc::Parts "{folder}/apt.conf.d";\n', encoding="utf-8")
    return config
