"""The table of settings: parsing, refusals, printing, and the settings that a reload may change."""

import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core import reload
from mpsd.core import settings as table
from mpsd.core.configuration.document import document, effective, from_mapping, parse
from mpsd.core.errors import ConfigurationError
from mpsd.core.model import ViolationKind
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.settings import OnViolation, Placement, Settings

ROWS: Final = {each.key: each for each in table.rows()}


def as_printed(settings: Settings) -> Settings:
    """Return the settings as `mpsd check` prints them, with the socket's path filled in."""
    return replace(settings, api=replace(settings.api, socket=settings.socket))


# -- what is asked for is what one gets -------------------------------------------------------------------------------


def test_nothing_asks_for_the_defaults() -> None:
    """An empty file, and a file of empty sections, result in the defaults."""
    assert parse("") == Settings()
    assert parse("\n".join(f"[{name}]" for name in ("api", "paths", "limits"))) == Settings()


def test_values_are_typed() -> None:
    """Each value is converted to its type."""
    settings = parse(
        """
        [paths]
        runtime_dir = "/srv/mps/run"
        [api]
        mode = "0660"
        [limits]
        active_thread_percentage = 33.3
        pinned_device_mem_limit = "1.5GiB"
        [admission]
        memory_reserve = 0
        placement = "spread"
        threads_oversubscription = 2
        """
    )
    assert settings.paths.runtime_dir == Path("/srv/mps/run")
    assert settings.socket == Path("/srv/mps/run/mpsd.sock")
    assert settings.api.mode == 0o660
    assert settings.default_limits.active_thread_percentage == ActiveThreadPercentage(333)
    assert settings.default_limits.pinned_device_mem_limit == PinnedDeviceMemLimit(1536)
    assert settings.admission.memory_reserve == 0
    assert settings.admission.placement is Placement.SPREAD
    assert settings.admission.threads_oversubscription == 2.0


def test_under_a_root() -> None:
    """`--root` moves every path that mpsd writes to, the socket included, also where the file names another path."""
    settings = parse('[api]\nsocket = "/elsewhere/mpsd.sock"\n[paths]\nlog_dir = "/var/log/x"\n').under(Path("/r"))
    assert settings.paths == table.Paths(Path("/r/run"), Path("/r/state"), Path("/r/log"))
    assert settings.socket == Path("/r/run/mpsd.sock")


# -- what cannot be meant is refused, with the setting, the value and what would do -----------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[limits", "not TOML"),
        (f"x = {'9' * 5000}", "not TOML"),
        (f"x = {'[' * 5000}", "not TOML"),
        ("[limts]", "unknown section 'limts'"),
        ("limits = 3", "'limits' is not a section"),
        ("[[limits]]", "'limits' is not a section"),
        ("[limits]\nactive_threads = 5", "unknown setting 'limits.active_threads'"),
        ('[paths]\nrun_dir = "/x"', "unknown setting 'paths.run_dir'"),
        ('[paths]\nruntime_dir = "relative"', "not an absolute path"),
        ("[paths]\nruntime_dir = 3", "not text"),
        ('[paths]\nruntime_dir = "/a\\u0000b"', "paths.runtime_dir"),
        ('[api]\nmode = "0999"', "octal"),
        ('[api]\nmode = "01777"', "octal"),
        ("[api]\nmode = 432", "not text"),
        ('[api]\ngroup = "a\\u0000b"', "api.group"),
        ("[limits]\nactive_thread_percentage = 0", "less than 0.1 %"),
        ("[limits]\nactive_thread_percentage = 100.1", "more than 100 %"),
        ("[limits]\nactive_thread_percentage = 0.01", "0.1"),
        ("[limits]\nactive_thread_percentage = nan", "not a percentage"),
        ("[limits]\nactive_thread_percentage = true", "not a number"),
        ('[limits]\nactive_thread_percentage = "50"', "not a number"),
        ('[limits]\npinned_device_mem_limit = "10T"', "unit"),
        ("[limits]\npinned_device_mem_limit = 0", "between"),
        ("[limits]\npinned_device_mem_limit = -1", "not a size"),
        ("[limits]\npinned_device_mem_limit = 1.5", "not a size"),
        ("[daemon]\nanswer_deadline = 0", "duration"),
        ("[daemon]\nanswer_deadline = inf", "duration"),
        ("[daemon]\nanswer_deadline = true", "duration"),
        (f"[daemon]\nanswer_deadline = 1{'0' * 400}", "answer_deadline"),
        ("[daemon]\ndeaths = 0", "from 1"),
        ("[daemon]\ndeaths = 2.0", "whole number"),
        (f"[api]\nevents = 1{'0' * 30}", "api.events"),
        ('[daemon]\nlayout = "one-for-all"', '"per-gpu"'),
        ('[admission]\nplacement = "best"', '"best-fit", "spread"'),
        ("[admission]\nthreads_oversubscription = 0.9", "factor"),
        ("[admission]\nthreads_oversubscription = nan", "factor"),
        ("[admission]\nmemory_reserve = false", "memory_reserve"),
        ('[log]\nformat = "xml"', '"json"'),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    """The refusal states the error, its place, and valid values; for a value its limit is the setting."""
    with pytest.raises(ConfigurationError) as refused:
        parse(text)
    error = refused.value
    assert words in error.detail
    assert error.hint
    if " = " in error.detail:
        assert error.limit in ROWS
        assert "The default is" in error.hint
    assert error.exit_code == 78


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("[limit]", "limits"),
        ("[Limits]", "limits"),
        ("[limits]\nactive_thread_percent = 5", "limits.active_thread_percentage"),
        ('[api]\nsockett = "/x"', "api.socket"),
        ('[paths]\nstatedir = "/x"', "paths.state_dir"),
    ],
)
def test_what_was_probably_meant(text: str, near: str) -> None:
    """The refusal of an unknown name suggests a similar one."""
    with pytest.raises(ConfigurationError) as refused:
        parse(text)
    assert refused.value.hint == f"did you mean {near!r}?"


def test_what_was_meant_is_not_guessed() -> None:
    """The refusal of a name without a similar one lists all names."""
    with pytest.raises(ConfigurationError) as refused:
        parse("[zzz]")
    assert all(field.name in refused.value.hint for field in fields(Settings) if field.name != "names")


_VALUES: Final = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from(["0660", "8GiB", "/x", "spread"])
)
_ANYTHING: Final = _VALUES | st.lists(_VALUES, max_size=3) | st.dictionaries(st.text(max_size=5), _VALUES, max_size=3)


@given(
    st.dictionaries(
        st.sampled_from([field.name for field in fields(Settings)]) | st.text(max_size=5),
        st.dictionaries(
            st.sampled_from([key.split(".")[1] for key in ROWS]) | st.text(max_size=5), _ANYTHING, max_size=4
        )
        | _ANYTHING,
        max_size=3,
    )
)
def test_any_document_is_taken_or_refused(document: dict[str, object]) -> None:
    """Any document becomes settings or a refusal with a hint, and nothing else."""
    try:
        settings = from_mapping(document)
    except ConfigurationError as error:
        refused = error
    else:
        assert isinstance(settings, Settings)
        return
    assert refused.detail
    assert refused.hint


# -- what is printed is what is in force ------------------------------------------------------------------------------

_NAMES: Final = st.text(st.sampled_from("aZ0 .%*'\"\\\n\t\x01\x7f\x85é\u2028\U0001f600"), min_size=1, max_size=8)
"""Any text that a quoted string of a file can contain; NUL is refused."""

_SETTINGS: Final = st.builds(
    Settings,
    paths=st.builds(table.Paths, runtime_dir=_NAMES.map(lambda name: Path("/") / name.replace("/", "_"))),
    api=st.builds(
        table.Api,
        mode=st.integers(0, 0o777),
        group=_NAMES,
        header_deadline=st.floats(0.001, 1e6),
        open=st.booleans(),
    ),
    limits=st.builds(
        table.DefaultLimits,
        active_thread_percentage=st.integers(1, 1000).map(ActiveThreadPercentage),
        pinned_device_mem_limit=st.none() | st.integers(1, 2**20).map(PinnedDeviceMemLimit),
    ),
    admission=st.builds(
        table.Admission,
        threads_oversubscription=st.floats(1, 100),
        memory_reserve=st.integers(0, 2**50),
        placement=st.sampled_from(Placement),
    ),
    roles=st.builds(table.Roles, users=st.lists(_NAMES, max_size=3).map(tuple)),
    quota=st.dictionaries(
        _NAMES,
        st.builds(
            table.Quota,
            leases=st.none() | st.integers(1, 100),
            memory=st.none() | st.integers(1, 2**50),
            gpus=st.none() | st.lists(_NAMES, max_size=2).map(tuple),
        ),
        max_size=2,
    ),
)


@given(_SETTINGS)
def test_what_is_printed_asks_for_the_same(settings: Settings) -> None:
    """`mpsd check` prints a document that parses to exactly the settings in force."""
    assert parse(document(settings)) == as_printed(settings)


@given(_SETTINGS)
def test_what_is_told_is_what_is_printed(settings: Settings) -> None:
    """`/v1/config` and `mpsd check` agree, except for absent settings."""
    printed = tomllib.loads(document(settings))
    for section, values in effective(settings).items():
        place = (
            printed.get("quota", {}).get(section.removeprefix("quota.")) if section not in printed else printed[section]
        )
        assert place == {name: value for name, value in values.items() if value is not None}


def test_every_kind_of_violation_has_its_action() -> None:
    """A kind has a row in [violations], unless no process may be ended for it."""
    own = {row.removeprefix("violations.") for row in ROWS if row.startswith("violations.")}
    settings = parse('[enforcement]\non_violation = "terminate"')
    ending = {kind for kind in ViolationKind if settings.on_violation(kind) is OnViolation.TERMINATE}
    assert ending == own == {*ViolationKind} - {"limits", "connections", "short", "user"}
    assert all(
        parse(f'[violations]\n{kind} = "terminate"').on_violation(kind) is OnViolation.TERMINATE for kind in ending
    )


def test_every_setting_has_its_meaning_in_print() -> None:
    """Every row of the table is printed with its help, also one that is absent by default."""
    printed = document(Settings())
    for row in ROWS.values():
        name = row.key.split(".")[1]
        assert [
            line
            for line in printed.splitlines()
            if f"# {row.help}" in line and line.startswith((f"{name} =", f"# {name} ="))
        ]


# -- reload -----------------------------------------------------------------------------------------------------------


@given(_SETTINGS, _SETTINGS)
def test_reload(old: Settings, new: Settings) -> None:
    """A reload applies the reloadable settings, keeps the others, and names both; afterwards only the others differ."""
    applied, waiting = reload.changed(old, new)
    assert not any(key != "quota" and ROWS[key].restart for key in applied)
    assert all(ROWS[key].restart for key in waiting)
    result = reload.reloaded(old, new)
    assert reload.changed(result, new) == ((), waiting)
    assert reload.changed(old, result) == (applied, ())
