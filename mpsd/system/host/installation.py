"""mpsd as a system service where pip, pipx or uv installed it: its files in /usr/local, and their removal.

Each file is recorded with its hash, so that a file that an administrator changed later is neither overwritten nor
removed. A Debian package does not use this module: it has its own units, and dpkg tracks its files.
"""

import contextlib
import hashlib
import json
import os
import signal
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mpsd import __version__
from mpsd.core.errors import AlreadyRunningError, ConfigurationError, NotFoundError, NotPermittedError
from mpsd.core.units import first_of
from mpsd.system.files import atomic_file, path_safety, rundir
from mpsd.system.host import systemd_units
from mpsd.system.host.configuration import USUAL, proposed, read_configuration
from mpsd.system.processes import descriptors, proc, process

TARGET: Final = Path("/usr/local")
"""Where systemd, man and the shells look for files that no system package owns."""

MANIFEST: Final = TARGET / "share/mpsd/installed.json"

_PACKAGED: Final = (Path("/usr/lib/systemd/system"), Path("/lib/systemd/system"))
"""The directories of units that packages install."""

_HOMES: Final = ("/home", "/root", "/run/user")
"""The directories that a unit with ProtectHome= does not see. Source: systemd.exec(5)."""

_RELOADS: Final = "notify-reload.conf"
_FIRST_WITH_RELOADS: Final = 253
"""The drop-in for Type=notify-reload, and the first systemd version that supports it."""

Say = Callable[[str], None]


def share() -> Path:
    """Return the directory of this installation's files that are not code."""
    return Path(sysconfig.get_path("data"), "share")


def programs() -> Path:
    """Return the directory of this installation's mpsd and mpsctl."""
    return Path(sysconfig.get_path("scripts"))


@dataclass(slots=True)
class Installation:
    """The files that belong into the system, and their state there."""

    say: Say
    """Called with a sentence for each action."""
    dry: bool = False
    """Whether to report the actions without taking them."""
    _noted: dict[str, str] = field(default_factory=dict)
    """The hash of each file that was written, by its path."""

    def __post_init__(self) -> None:
        """Read the record of an earlier installation. Raises ConfigurationError for a record that does not parse."""
        raw = atomic_file.read(MANIFEST)
        if raw is None:
            return
        match json.loads(raw):
            case {"files": dict(files)}:
                self._noted = {str(path): str(digest) for path, digest in files.items()}
            case _:
                raise ConfigurationError(f"{MANIFEST} is not a list of files", hint="move it away, and install again")

    # -- installing ---------------------------------------------------------------------------------------------------

    def install(self, configuration: str | None = None) -> None:
        """Write the files of the service, and make systemd read them. A second call changes nothing.

        Without a configuration, the example is installed if there is none. Raises NotPermittedError and
        ConfigurationError where the installation is impossible, before anything is written; and OSError.
        """
        _refuse_where_it_cannot_be()
        wanted = files()
        for path, data in wanted.items():
            self._put(path, data)
        for earlier in [each for each in self._noted if Path(each) not in wanted]:
            self._remove(Path(earlier))
            del self._noted[earlier]
        if configuration is not None:
            self.configure(configuration)
        elif not os.path.lexists(USUAL):
            self._write(USUAL, (share() / "mpsd/mpsd.toml").read_bytes())
        self._note()
        for path in wanted:
            if path.parent.name == "sysusers.d":
                self._run("systemd-sysusers", str(path))
            if path.parent.name == "tmpfiles.d":
                self._run("systemd-tmpfiles", "--create", str(path))
        self._run("systemctl", "daemon-reload")

    def configure(self, text: str, usual: Path = USUAL) -> None:
        """Write a configuration; beside one that is there, which is kept, as a proposal. Raises OSError."""
        data, there = text.encode(), atomic_file.read(usual)
        if there == data:
            self.say(f"{usual} is up to date")
        elif not os.path.lexists(usual):
            self._write(usual, data)
        else:  # also beside a link whose target is not there now
            new = proposed(usual)
            self._write(new, data)
            self.say(
                f"{usual} exists, and is kept; to use the new one: mv {new} {usual} && mpsd check &&"
                " systemctl reload-or-restart mpsd"
            )

    def _put(self, path: Path, data: bytes) -> None:
        there = atomic_file.read(path)
        if there == data:
            self.say(f"{path} is up to date")
            self._noted[str(path)] = _digest(data)
        elif there is None or self._is_ours(path, there):
            self._write(path, data)
            self._noted[str(path)] = _digest(data)
        else:
            self.say(
                f"{path} was changed, or was not written by mpsd, and is kept; to get this version's file, move it away"
            )

    def _is_ours(self, path: Path, data: bytes) -> bool:
        return self._noted.get(str(path)) == _digest(data)

    def _write(self, path: Path, data: bytes) -> None:
        if self._does(f"write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.write(path, data, mode=0o644)

    def _note(self) -> None:
        if self._noted:
            document = {"version": __version__, "files": self._noted}
            self._write(MANIFEST, json.dumps(document, indent=1).encode() + b"\n")

    # -- uninstalling -------------------------------------------------------------------------------------------------

    def uninstall(self, *, purge: bool = False) -> None:
        """Stop mpsd, and remove the files that are unchanged; with `purge`, also its configuration, state and logs.

        Raises NotPermittedError, NotFoundError where nothing is installed, ConfigurationError, and OSError.
        """
        systemd_units.refuse_without_root()
        if not self._noted:
            raise NotFoundError(
                f"nothing is installed: there is no {MANIFEST}", hint="for the details: mpsctl service status"
            )
        # Read first, so that a wrong configuration stops this before anything is removed.
        paths = read_configuration(None).paths if purge else None
        units = [Path(each).name for each in self._noted if Path(each).parent.name == "system"]
        self._run("systemctl", "disable", "--now", *units)
        for noted in self._noted:
            self._remove(Path(noted))
        if self._does(f"remove {MANIFEST}"):
            MANIFEST.unlink()
            with contextlib.suppress(OSError):
                MANIFEST.parent.rmdir()
        self._run("systemctl", "daemon-reload")
        self._run("systemctl", "reset-failed", "mpsd*")  # otherwise systemd lists failed units that no longer exist
        if paths is not None:
            for each in (USUAL, proposed(USUAL)):
                if each.exists() and self._does(f"remove {each}"):
                    each.unlink()
            with contextlib.suppress(OSError):  # the directory has other files, and stays
                USUAL.parent.rmdir()
            # Not the runtime directory: a control daemon that still runs has its sockets there, and a reboot clears it.
            for each in (paths.state_dir, paths.log_dir):
                self.purge(each)

    def _remove(self, path: Path) -> None:
        there = atomic_file.read(path)
        if there is None:
            return
        if not self._is_ours(path, there):
            self.say(f"{path} was changed, and is kept")
            return
        if self._does(f"remove {path}"):
            path.unlink()

    def purge(self, directory: Path) -> None:
        """Remove mpsd's files from its directory of state or of logs, and the directory unless it has other files.

        The configuration may name any directory, such as /var/log.
        """
        try:
            rundir.check_directory(directory)
        except ConfigurationError as error:  # mpsd never used it
            self.say(f"{directory} is kept: {error.detail}")
            return
        if not directory.exists():
            return
        own, others = rundir.contents(directory)
        if others:
            self.say(f"{directory} has files that mpsd did not make, and is kept: {first_of(others)}")
        elif not self._does(f"remove {directory}"):
            return
        for each in own if others else (*own, directory):
            if not others or self._does(f"remove {each}"):
                each.rmdir() if stat.S_ISDIR(each.lstat().st_mode) else each.unlink()

    # -- telling ------------------------------------------------------------------------------------------------------

    def differences(self) -> Iterator[str]:
        """Yield the differences from what this version would install, or that nothing is installed."""
        if not self._noted:
            packaged = _packaged()
            yield (
                "nothing is installed" if packaged is None else f"nothing is installed: {packaged} belongs to a package"
            )
            return
        for path, data in files().items():
            there = atomic_file.read(path)
            if there is None:
                yield f"{path} is missing"
            elif there != data:
                which = "from another version of mpsd" if self._is_ours(path, there) else "changed since"
                yield f"{path} is {which}"

    # -- doing --------------------------------------------------------------------------------------------------------

    def _does(self, what: str) -> bool:
        """Report an action, and tell whether to take it."""
        self.say(f"would {what}" if self.dry else what)
        return not self.dry

    def _run(self, *command: str) -> None:
        if self._does(" ".join(command)):
            systemd_units.finished(*command)


def files() -> dict[Path, bytes]:
    """Return the content of every file for the system, by path; the units start the mpsd of this installation."""
    found = {TARGET / "share" / path.relative_to(share()): path.read_bytes() for path in _shared()}
    reloads = _knows_reloads()
    for path in sorted((share() / "mpsd/systemd").iterdir()):
        if path.name != _RELOADS or reloads:
            text = path.read_text(encoding="utf-8").replace("/usr/bin/mps", f"{programs()}/mps")
            found[_place(path.name)] = text.encode()
    return found


def _shared() -> Iterator[Path]:
    """Yield manual pages and completions, which have the same relative paths below any prefix."""
    for folder in ("man", "bash-completion", "fish", "zsh"):
        for path in sorted((share() / folder).rglob("*")):
            if path.is_file() and path.name.lstrip("_").startswith("mps"):
                yield path


def _place(name: str) -> Path:
    """Return the destination of a file for systemd."""
    lib = TARGET / "lib"
    kind = name.removeprefix("mpsd.")
    if kind in {"sysusers.conf", "tmpfiles.conf"}:
        return lib / kind.replace("conf", "d") / "mpsd.conf"
    if name == _RELOADS:
        return lib / "systemd/system/mpsd.service.d" / name
    return lib / "systemd" / ("system-preset" if name.endswith(".preset") else "system") / name


def _knows_reloads() -> bool:
    """Tell whether this systemd supports Type=notify-reload; 253 is the first. Raises ConfigurationError."""
    said = systemd_units.finished("systemctl", "--version").split()
    return int(said[1].partition(".")[0]) >= _FIRST_WITH_RELOADS


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _refuse_where_it_cannot_be() -> None:
    """Refuse where the service could not run, or would run code that other users can change.

    Raises NotPermittedError, ConfigurationError, and OSError for a path that cannot be inspected.
    """
    systemd_units.refuse_without_systemd("run mpsd under the system's own service manager: mpsd run")
    packaged = _packaged()
    if packaged is not None:
        raise ConfigurationError(
            f"{packaged} belongs to a package, which contains everything that this command would install",
            hint="use the package (mpsctl service configure writes its configuration), or remove it: apt remove mpsd",
        )
    for path in (programs() / "mpsd", Path(sys.executable).resolve(), Path(__file__)):
        _refuse_homes(path)
        path_safety.check_path(path, itself=True)


def _packaged() -> Path | None:
    """Return the unit that a package installed; None where there is none."""
    return next((unit for place in _PACKAGED if (unit := place / "mpsd.service").exists()), None)


def _refuse_homes(path: Path) -> None:
    for each in (path, path.resolve()):
        if any(each.is_relative_to(home) for home in _HOMES):
            raise ConfigurationError(
                f"{each} is in a home directory, which the service cannot see (ProtectHome)",
                hint="install mpsd outside home directories, in its checkout:"
                " PIPX_HOME=/opt/pipx PIPX_BIN_DIR=/usr/local/bin pipx install ., or"
                " UV_TOOL_DIR=/opt/uv UV_TOOL_BIN_DIR=/usr/local/bin UV_PYTHON_INSTALL_DIR=/opt/uv/python"
                " uv tool install .",
            )


# -- whether a service runs --------------------------------------------------------------------------------------------

# The mpsd that uses a runtime directory now, found as the holder of its lock, and how it is ended.


_UNIT: Final = "mpsd.service"


async def end(runtime_dir: Path) -> None:
    """End the mpsd of a runtime directory, and return when it is gone; at once where there is none.

    Raises NotPermittedError where it belongs to another user, and AlreadyRunningError where systemd runs it, since
    systemd would start it again.
    """
    for identity in descriptors.holders(runtime_dir / "mpsd.lock"):
        living = process.adopt(identity)
        if living is None:
            continue
        try:
            if identity not in descriptors.holders(runtime_dir / "mpsd.lock"):
                continue
            if any(f"/{_UNIT}" in path for path in proc.control_groups(identity.pid).values()):
                raise AlreadyRunningError(
                    f"mpsd runs as a service of systemd (pid {identity.pid})",
                    hint="stop it, and its control daemons once they have no clients: systemctl start"
                    " mpsd-stop-daemons.service",
                )
            living.signal(signal.SIGTERM)
            await living.wait()
        except PermissionError:
            raise NotPermittedError(
                f"mpsd runs as another user (pid {identity.pid}), and uid {os.getuid()} may not end it",
                hint="use sudo mpsd stop",
            ) from None
        finally:
            living.close()
