"""Programs of a newer Debian than this machine's: a package is fetched once, and nothing is installed."""

import fcntl
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from tests import real
from tests.real.apt import FetchError, architecture, configuration, mirrors, run
from tests.tools import lacking


def programs(variable: str, package: str, suite: str, wanted: Collection[str], folder: str = "") -> Path:
    """Return a directory with these files of a package; if they cannot be fetched, the test skips, or fails.

    They are kept in the cache that `variable` names, in a folder of it if it has the programs of another suite, too.
    """
    place = real.cache(variable, package) / folder
    place.mkdir(parents=True, exist_ok=True)
    names = {Path(each).name: each for each in wanted}
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all((place / name).exists() for name in names):
            try:
                _fetch(place, package, suite, names.values())
            except (FetchError, OSError) as error:
                lacking(f"{package} of Debian's {suite} did not come: {error}")
    return place


def _fetch(place: Path, package: str, suite: str, wanted: Collection[str]) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=place) as name:
        folder = Path(name)
        config = configuration(folder, mirrors()[0], suite, "main", architecture())
        run("apt-get", "-qq", "update", config=config)
        run("apt-get", "-qq", "download", package, config=config, cwd=folder)
        (file,) = folder.glob(f"{package}_*.deb")
        run("dpkg-deb", "--extract", str(file), str(folder / "root"))
        for each in wanted:
            shutil.move(folder / "root" / each, place / Path(each).name)
