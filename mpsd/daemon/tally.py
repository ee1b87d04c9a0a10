"""The deaths of one control daemon, kept on disk, so that neither a restart nor a crash of mpsd forgives them."""

from dataclasses import asdict
from pathlib import Path

import msgspec

from mpsd.core.restart import Death
from mpsd.system import clock, store


class _File(msgspec.Struct, forbid_unknown_fields=True):
    boot_id: str
    deaths: list[Death]
    failed: str | None


class Tally:
    """The deaths that count, and the reason for giving up where that was decided."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.deaths: tuple[Death, ...] = ()
        self.failed: str | None = None

    def load(self) -> None:
        """Read what an earlier mpsd noted in this boot; deaths before a reboot are forgiven.

        A file that cannot be understood counts as none: it is mpsd's own, in its runtime directory, and forgiving a
        death harms nobody.
        """
        raw = store.read(self._path)
        if raw is None:
            return
        try:
            file = msgspec.json.decode(raw, type=_File)
        except (msgspec.DecodeError, msgspec.ValidationError):
            return
        if file.boot_id == clock.boot_id():
            self.deaths, self.failed = tuple(file.deaths), file.failed

    def note(self, deaths: tuple[Death, ...], failed: str | None = None) -> None:
        """Replace what is known. Raises OSError when it could not be written; it is known all the same."""
        self.deaths, self.failed = deaths, failed
        plain = {"boot_id": clock.boot_id(), "deaths": [asdict(death) for death in deaths], "failed": failed}
        store.write(self._path, msgspec.json.encode(plain))
