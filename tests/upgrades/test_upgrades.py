"""The files of earlier releases are opened, and their callers are served: docs/upgrades.md."""

import copy
import json
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpsd.core.configuration.document import effective, parse
from mpsd.core.errors import catalogue
from mpsd.daemon.api.openapi import document
from mpsd.daemon.api.routes import ROUTES
from mpsd.system import clock
from mpsd.system.proc import start_ticks
from tests.node import Node
from tests.upgrades import RUNTIME, STATE, Release, releases, restore
from tests.upgrades.__main__ import BOOT, ROOT, commands
from tests.upgrades.contained import broken

RELEASES = releases()


@pytest.fixture(params=RELEASES, ids=lambda release: release.version)
def release(request: pytest.FixtureRequest) -> Release:
    """Return each stored release."""
    kept: Release = request.param
    return kept


@pytest.fixture
def holder() -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a process that can hold leases."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


# -- what is on the disk -----------------------------------------------------------------------------------------------


def of_this_boot(lease: dict[str, Any], pid: int) -> dict[str, Any]:
    """Return a lease as if this process had requested it in this boot."""
    ends = {name: clock.monotonic() + 3600 for name in ("until", "expires") if lease[name] is not None}
    return {
        **lease,
        "owner": {**lease["owner"], "pid": pid},
        "holder": {"pid": pid, "start_ticks": start_ticks(pid)},
        **ends,
    }


def inherit(release: Release, root: Path, pid: int) -> list[dict[str, Any]]:
    """Write the files of a release as if it had just ended, and return its leases."""
    placed = {
        path.name: path.read_text(encoding="utf-8").replace(ROOT, f"{root}").replace(BOOT, clock.boot_id())
        for path in release.folder.iterdir()
    }
    stores = {name: json.loads(placed[f"{name}.json"]) for name in (*RUNTIME, *STATE)}
    rows = stores["leases.db"]["rows"]["leases"]
    data = 2 if stores["leases.db"]["user_version"] == 1 else 3  # the column of a lease, empty for none
    leases = []
    for row in rows:
        if row[data]:
            leases.append(of_this_boot(json.loads(row[data]), pid))
            row[data] = json.dumps(leases[-1])
    for directory, names in (("run", RUNTIME), ("state", STATE)):
        (root / directory).mkdir(mode=0o755)
        for name in names:
            restore(stores[name], root / directory / name)
    for name in ("gpu1.intention.json", "compute-modes.json", "last-event"):
        path = root / "state" / name
        path.write_text(placed[name], encoding="utf-8")
        path.chmod(0o600)
    return leases


def test_what_it_left_is_opened(release: Release, short_tmp: Path, holder: "subprocess.Popen[bytes]") -> None:
    """Leases continue, waiting requests wait, held daemons are held, events exist; nothing is set aside."""
    leases = inherit(release, short_tmp, holder.pid)
    stored = release.json("history.db.json")["rows"]["events"]
    before = [json.loads(line) for _, _, lines in stored for line in lines.split("\n")]
    node = Node(short_tmp, config="[api]\nevents_age = 1e9\n")
    try:
        node.start(ready=False)
        node.wait_for_state("gpu0", "ready")
        node.wait_for_state("gpu1", "held")
        now = {each["id"]: each for each in node.get("/v1/leases").json["leases"]}
        assert now.keys() == {each["id"] for each in leases}
        for lease in leases:
            shares = [(each["gpu"], each["env"]) for each in now[lease["id"]]["shares"]]
            own = {"MPSD_LEASE": lease["id"]}
            assert shares == [(each["gpu"], {**each["env"], **own}) for each in lease["shares"]]
            assert now[lease["id"]]["state"] == lease["state"]
            assert now[lease["id"]]["name"] == lease["request"]["name"]
        told = [json.loads(line) for line in node.get("/v1/events?after=0").body.splitlines()]
        assert [each["event"] for each in told[: len(before)]] == [each["event"] for each in before]
        assert [each["seq"] for each in told] == list(range(1, len(told) + 1))
        assert not list(short_tmp.rglob("*set-aside*"))
        assert not list(short_tmp.rglob("*.damaged"))
    finally:
        node.clean_up()


def test_damage_would_be_seen(release: Release, short_tmp: Path, holder: "subprocess.Popen[bytes]") -> None:
    """A store that this mpsd cannot open makes the test above fail: here it has an unknown version."""
    inherit(release, short_tmp, holder.pid)
    (short_tmp / "run" / "leases.db").unlink()
    dump = {**release.json("leases.db.json"), "user_version": 1000}
    restore(dump, short_tmp / "run" / "leases.db")
    node = Node(short_tmp)
    try:
        node.start(ready=False)
        assert node.get("/v1/leases").json["leases"] == []
        assert list(short_tmp.rglob("*set-aside*"))
    finally:
        node.clean_up()


def test_its_configuration_is_read(release: Release) -> None:
    """A file with every setting of the release has the same meaning."""
    text = release.text("mpsd.toml")
    wanted = _values(tomllib.loads(text))
    settings = effective(parse(text))
    assert {key: settings[section][name] for key in wanted for section, name in [key]} == wanted


def _values(document: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """Return every setting of a file, by its section and its name."""
    sections = {**{f"quota.{name}": quota for name, quota in document.pop("quota").items()}, **document}
    return {(section, name): value for section, values in sections.items() for name, value in values.items()}


# -- what is asked -----------------------------------------------------------------------------------------------------


WIDER = {
    # Accepts more units.
    r"POST /v1/leases asked.memory: pattern is ^[0-9]+(\.[0-9]+)? ?([Bb]|[KMGTkmgt]([Ii][Bb]?|[Bb]))?$"
}
"""Patterns that match more than before."""

WORDS = {
    "POST /v1/leases asked.holder.while: only ['populated', 'exists']",
    "POST /v1/leases asked.processes: only ['any']",
    "POST /v1/leases asked.stop: only ['terminate', 'sigterm']",
    "POST /v1/leases/{id}/holders asked.while: only ['populated', 'exists']",
}
"""Patterns that are now lists of the same words."""


AFTER = "GET /v1/events after: integer is no string"
"""A number in a query is text, with the same digits as before, or `latest`."""


def test_its_callers_are_served(release: Release) -> None:
    """Every former request is valid, and every answer has its former fields: none is missing, none newly required."""
    assert set(broken(release.json("openapi.json"), document(ROUTES))) <= WIDER | WORDS | {AFTER}


CHANGED = {"never_fits": [422, 65]}
"""Errors whose statuses changed on purpose: 75 means "not now", and wrappers repeated requests that can never fit."""


def test_its_errors_mean_the_same(release: Release) -> None:
    """Each code of an error exists, with its status and its exit status."""
    errors = {error.code: [error.status, error.exit_code] for error in catalogue()}
    was: dict[str, list[int]] = release.json("errors.json")
    assert {code: errors.get(code) for code in was} == {**was, **CHANGED}


def test_its_commands_are_there(release: Release) -> None:
    """Each command of mpsctl accepts its former options."""
    now = {name: set(options) for name, options in commands().items()}
    was: dict[str, list[str]] = release.json("commands.json")
    missing = {name: set(options) - now.get(name, set()) for name, options in was.items()}
    assert {name: options for name, options in missing.items() if options or name not in now} == {}


LEASE = ("components", "schemas", "LeaseOut")
SCHEMAS = ("components", "schemas")
ASKED = (*SCHEMAS, "LeaseOfThreads")
POST = ("paths", "/v1/leases", "post")


@pytest.mark.parametrize(
    ("place", "name", "value", "says"),
    [
        ((*LEASE, "properties"), "env", None, "GET /v1/leases 200.leases[].env: it is gone"),
        ((*LEASE, "properties", "priority"), "type", "string", ".priority: string is no integer"),
        (LEASE, "required", ["id"], ".state: it is required"),
        ((*SCHEMAS, "RequestedOwner", "properties"), "groups", None, "asked.owner.groups: it is not known"),
        ((*ASKED, "properties", "gpus"), "maximum", 8, ".gpus: maximum is 8"),
        ((*ASKED, "properties", "name"), "pattern", "^a$", ".name: pattern is ^a$"),
        (ASKED, "required", ["threads", "memory", "gpus"], ".gpus: it is required"),
        (("paths", "/v1/gpus"), "get", None, "GET /v1/gpus: it is gone"),
        (("paths",), "/v1/gpus", None, "GET /v1/gpus: it is gone"),
        ((*POST, "responses"), "201", None, "POST /v1/leases: 201 is gone"),
        (POST, "requestBody", None, "POST /v1/leases: it takes no body"),
        (POST, "parameters", [{"in": "query", "name": "key", "required": True}], "key: it is required"),
        (("paths", "/v1/events", "get"), "parameters", [], "GET /v1/events after: it is gone"),
        (("paths", "/v1/leases/{id}/attach", "post"), "requestBody", {"required": True}, "attach: it needs a body"),
    ],
)
def test_what_breaks_callers_is_seen(place: tuple[str, ...], name: str, value: object, says: str) -> None:
    """Each kind of break for callers is found; an addition is none."""
    before, now = document(ROUTES), copy.deepcopy(document(ROUTES))
    assert broken(before, now) == []
    part = now
    for key in place:
        part = part[key]
    if value is None:
        del part[name]
    else:
        part[name] = value
    assert any(says in each for each in broken(before, now)), broken(before, now)


def test_what_is_added_is_fine() -> None:
    """An additional field in an answer, an additional optional one in a request, and a new route break nothing."""
    before, now = document(ROUTES), copy.deepcopy(document(ROUTES))
    schemas = now["components"]["schemas"]
    schemas["LeaseOut"]["properties"]["colour"] = {"type": "string"}
    schemas["LeaseOut"]["required"].append("colour")
    schemas["LeaseOfThreads"]["properties"]["colour"] = {"type": "string", "default": "green"}
    schemas["LeaseOfThreads"]["properties"]["gpus"]["maximum"] = 128
    now["paths"]["/v1/colours"] = now["paths"]["/v1/gpus"]
    assert broken(before, now) == []


def test_this_release_is_kept_or_new() -> None:
    """There is a release to compare with; otherwise the tests above would prove nothing."""
    assert RELEASES
