"""The configuration file on the disk."""

from dataclasses import replace
from pathlib import Path
from typing import Final

from msgspec import structs

from mpsd.core import roles
from mpsd.core.configuration.document import parse
from mpsd.core.errors import ConfigurationError
from mpsd.core.model import Known
from mpsd.core.setting_parsers import UserNames
from mpsd.core.settings import Settings
from mpsd.system.processes import foreign_files
from mpsd.system.processes.foreign_reader import USER_DATABASE, ForeignReader

USUAL: Final = Path("/etc/mpsd/mpsd.toml")


def proposed(usual: Path) -> Path:
    """Return the path of a configuration that waits for an administrator, beside the one in force."""
    return usual.with_name(f"{usual.name}.new")


def read_text(path: Path | None, usual: Path) -> str | None:
    """Return the text of a configuration file; None where `path` is None and the usual file is absent."""
    where = path or usual
    try:
        return where.read_text(encoding="utf-8")
    except FileNotFoundError:
        if path is None:
            return None
        raise ConfigurationError(f"there is no configuration file {where}", hint="check --config") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{where} is not text in UTF-8: byte {error.start + 1} is {error.object[error.start]:#04x}",
            hint=f"name a configuration file, such as {usual}, or save it as UTF-8",
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"{where} cannot be read: {error.strerror}",
            hint="let the user who runs the program read it: check the permissions of it and of its directories",
        ) from error


def read_configuration(path: Path | None) -> Settings:
    """Return the settings of a file, or the defaults where `path` is None and the usual file is absent.

    The users and groups in the file are not looked up. Raises ConfigurationError for a file that cannot be read or does
    not parse.
    """
    text = read_text(path, USUAL)
    if text is None:
        return Settings()
    try:
        return parse(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path or USUAL}: {error.detail}", hint=error.hint, limit=error.limit) from None


async def with_names(settings: Settings) -> Settings:
    """Return the settings of a program that ends soon with the numbers of their users and groups."""
    async with ForeignReader() as reader:
        return await look_up_names(settings, UserNames(), reader)


async def look_up_names(settings: Settings, before: UserNames, reader: ForeignReader) -> Settings:
    """Return the settings with the numbers of their users and groups, so that no request waits for the user database.

    `before` has the numbers of earlier settings, which stand for as long as the user database does not answer.
    """
    wanted = roles.names_in(settings)
    found = await reader.ask(USER_DATABASE, foreign_files.look_up, [*wanted]) if wanted else Known(UserNames())
    if isinstance(found, Known):
        return replace(settings, names=found.value)
    known = {*before.uids, *(f"%{each}" for each in before.gids)}
    return replace(settings, names=structs.replace(before, unknown=tuple(each for each in wanted if each not in known)))
