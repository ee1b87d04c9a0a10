"""The configuration file on the disk."""

from dataclasses import replace
from pathlib import Path
from typing import Final

from mpsd.core import roles
from mpsd.core.configuration.document import parse
from mpsd.core.errors import ConfigurationError
from mpsd.core.settings import Settings
from mpsd.system.sockets import credentials

USUAL: Final = Path("/etc/mpsd/mpsd.toml")


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

    The users and groups in the file are looked up here, so that no request waits for the user database. Raises
    ConfigurationError for a file that cannot be read or does not parse.
    """
    text = read_text(path, USUAL)
    if text is None:
        return Settings()
    try:
        parsed = parse(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path or USUAL}: {error.detail}", hint=error.hint, limit=error.limit) from None
    return replace(parsed, names=credentials.look_up(roles.names_in(parsed)))
