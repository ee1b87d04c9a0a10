"""The configuration file, as it is read from the disk."""

from pathlib import Path

from mpsd.core import settings
from mpsd.core.errors import ConfigurationError
from mpsd.core.settings import Settings


def read_configuration(path: Path | None) -> Settings:
    """Return the settings of a file, or the defaults where none is named and the usual one is absent.

    Raises ConfigurationError for a file that cannot be read or does not parse.
    """
    where = path or Path("/etc/mpsd/mpsd.toml")
    try:
        return settings.parse(where.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if path is None:
            return Settings()
        raise ConfigurationError(f"there is no configuration file {where}", hint="check --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {where}: {error}", hint="check its permissions") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error.detail}", hint=error.hint, limit=error.limit) from None
