"""A sample is stored once, whatever happens to the file afterwards."""

import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from mpsd.core.accounting.accounts import SECOND
from mpsd.core.admission.users import Usage
from mpsd.core.reload import LiveSettings
from mpsd.core.settings import LogFormat, Settings
from mpsd.daemon.accounting.account_store import ACCOUNTS_SCHEMA, AccountStore
from mpsd.daemon.accounting.accountant import Accountant
from mpsd.daemon.record.log import configure
from mpsd.system.files.database import Database
from tests.daemon.accounting.test_recovery import SAMPLE, at, lease

KEEPING: Final = (
    f"{ACCOUNTS_SCHEMA[0]}; CREATE TRIGGER keep BEFORE DELETE ON samples BEGIN SELECT RAISE(ABORT, 'no room'); END",
)
"""The schema of a file from which no sample can be removed, as on a disk that is full again."""

NODE: Final[Any] = SimpleNamespace(
    violation_monitor=SimpleNamespace(usages={}, held={}),
    leases=SimpleNamespace(ledger=SimpleNamespace(usage=Usage(3600.0))),
)
EVENTS: Final[Any] = SimpleNamespace(flush=lambda: None, latest=0)


def test_old_samples_that_cannot_be_removed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The new sample counts once where it was stored, and the old ones could not be removed; that is reported."""
    granted = lease(1, 500, 0)
    with closing(Database(tmp_path / "accounts", KEEPING)) as database:
        store = AccountStore(database)
        accountant = Accountant(store, LiveSettings(Settings()), configure(LogFormat.JSON, stream=sys.stderr))
        accountant.note(SAMPLE, {granted.id: granted})
        accountant.sample(NODE, EVENTS, at(1))
        later = timedelta(days=30).total_seconds()
        accountant.sample(NODE, EVENTS, at(later))
        assert "history_not_pruned" in capfd.readouterr().err
        accountant.sample(NODE, EVENTS, at(later + 1), everything=True)
        threads = sum(period.threads for periods in store.samples(0, 0) for _, period in periods)
    assert threads == 500 * (later + 1) * SECOND
