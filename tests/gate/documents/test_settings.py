"""The table of settings is complete, and has the fixed names."""

import pytest

from mpsd.core.configuration.document import parse, render
from mpsd.core.settings import SettingRow, Settings, rows

CONTRACT = {
    "paths.runtime_dir": "/run/mpsd",
    "paths.state_dir": "/var/lib/mpsd",
    "paths.log_dir": "/var/log/mpsd",
    "api.socket": None,
    "api.mode": ...,
    "api.group": ...,
    "daemon.control": "nvidia-cuda-mps-control",
    "daemon.layout": "per-gpu",
    "daemon.compute_mode": "leave",
    "limits.active_thread_percentage": "100.0",
    "limits.pinned_device_mem_limit": None,
    "admission.threads_oversubscription": "1.0",
    "admission.memory_reserve": ...,
    "admission.placement": "best-fit",
}
"""The fixed names, with their fixed defaults (`...` where the default is not fixed)."""


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: row.key)
class TestEachSetting:
    """Rules for every row."""

    def test_default_reads_back(self, row: SettingRow) -> None:
        """A setting's default, as the table shows it, parses to the same value in a file."""
        if row.default is None:
            return
        section, name = row.key.split(".")
        assert parse(f"[{section}]\n{name} = {render(row, row.default)}\n") == Settings()


def test_keys_are_unique() -> None:
    """No setting has two rows."""
    keys = [row.key for row in rows()]
    assert sorted(set(keys)) == sorted(keys)


def test_the_contract_stands() -> None:
    """The fixed names exist, with their fixed defaults."""
    defaults = {row.key: row.default for row in rows()}
    assert defaults.keys() >= CONTRACT.keys()
    for key, default in CONTRACT.items():
        if default is not ...:
            assert (defaults[key] if defaults[key] is None else str(defaults[key])) == default, key
