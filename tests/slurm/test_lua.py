"""mpsd.lua under real Lua, in each version that Debian's builds of Slurm are linked with, without Slurm."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

SCRIPT: Final = Path(__file__).parents[2] / "mpsd" / "slurm" / "mpsd.lua"

GIB: Final = 1024**3

_SLURM: Final = """
messages = {}
slurm = {SUCCESS = 0, ERROR = -1, log_user = function(...) table.insert(messages, string.format(...)) end}
-- As Slurm's own records: a field that is not known is an error, not nil.
local function record_of(fields, known)
    return setmetatable({}, {
        __index = function(_, name) assert(known[name], "no field " .. name); return fields[name] end,
        __newindex = function(_, name, value) assert(known[name], "no field " .. name); fields[name] = value end})
end
function new_record(fields, old)
    local known = {comment = true, shared = true, tres_per_job = true, tres_per_node = true, tres_per_socket = true}
    if not old then known.tres_per_task = true end
    return record_of(fields, known)
end
"""


class Plugin:
    """The script in a Lua of its own, as slurmctld loads it."""

    def __init__(self, version: str) -> None:
        self._lua: Any = importlib.import_module(f"lupa.{version}").LuaRuntime(unpack_returned_tuples=True)
        self._lua.execute(_SLURM)
        self.module: Any = self._lua.execute(SCRIPT.read_text(encoding="utf-8"))

    def submit(self, fields: Mapping[str, object], *, old: bool = False) -> dict[str, Any] | str:
        """Return the fields of the job that was let in, or the message of the refusal."""
        table = self._lua.table_from(fields)
        return self._outcome(self.module.submit(self._lua.globals().new_record(table, old)), table)

    def modify(self, present: str | None, fields: Mapping[str, str]) -> dict[str, Any] | str:
        """Change a job that has this comment; return the changed fields, or the message of the refusal."""
        table = self._lua.table_from(fields)
        new_record = self._lua.globals().new_record
        record = new_record(self._lua.table_from({} if present is None else {"comment": present}), False)
        return self._outcome(self.module.modify(new_record(table, False), record), table)

    @property
    def messages(self) -> list[str]:
        return list(self._lua.globals().messages.values())

    def _outcome(self, status: int, table: Any) -> dict[str, Any] | str:
        if status == 0:
            return dict(table.items())
        assert status == -1
        assert self.messages, "it refuses without a word"
        return self.messages[-1]


@pytest.fixture(params=["lua51", "lua53", "lua54", "luajit21"])
def plugin(request: pytest.FixtureRequest) -> Plugin:
    found = Plugin(request.param)
    found.module.gpu_memory = 80 * GIB
    return found


@pytest.mark.parametrize("written", ["gres:mps:25", "gres/mps:25", "mps:25", "gres/mps=25", "gres/mps:a100:25"])
def test_a_share_goes_into_the_comment(plugin: Plugin, written: str) -> None:
    """Each spelling of Slurm's versions counts, and memory that was not asked for is scheduled in proportion."""
    job = plugin.submit({"tres_per_node": written})
    assert isinstance(job, dict)
    assert job["comment"] == "mpsd:threads=25"
    assert job["tres_per_node"].startswith(f"{written},gres")
    assert job["tres_per_node"].endswith("gpumem:20480M")
    assert "20480 MiB" in plugin.messages[-1]


@pytest.mark.parametrize("mark", [":", "/"])
def test_memory_goes_into_the_comment(plugin: Plugin, mark: str) -> None:
    written = f"gres{mark}gpu:0,gres{mark}mps:25,gres{mark}gpumem:8G"
    assert plugin.submit({"tres_per_node": written}) == {
        "tres_per_node": written,
        "comment": f"mpsd:threads=25,memory={8 * GIB}",
    }
    assert not plugin.messages


def test_shards_are_parts_of_a_gpu(plugin: Plugin) -> None:
    job = plugin.submit({"tres_per_node": "gres/shard:3"})
    assert isinstance(job, dict)
    assert job["comment"] == "mpsd:threads=75"
    assert plugin.submit({"tres_per_node": "gres/shard"}) == {
        "tres_per_node": "gres/shard,gres/gpumem:20480M",
        "comment": "mpsd:threads=25",
    }


def test_counts_of_another_size(plugin: Plugin) -> None:
    """A site that counts mps in GiB has as many per GPU as that has memory."""
    plugin.module.per_gpu.mps, plugin.module.memory = 80, None
    assert plugin.submit({"tres_per_node": "gres/mps:10"}) == {
        "tres_per_node": "gres/mps:10",
        "comment": "mpsd:threads=12.5",
    }
    assert "12.5 %" in plugin.messages[-1]
    assert "mps:81" in str(plugin.submit({"tres_per_node": "gres/mps:81"}))


def test_jobs_without_a_share_are_left_alone(plugin: Plugin) -> None:
    none: list[dict[str, str]] = [{}, {"comment": "a run"}]
    for fields in (*none, {"tres_per_node": "gres/gpu:2"}, {"tres_per_node": "gres/mps:0"}):
        assert plugin.submit(fields) == fields
        assert plugin.submit(fields, old=True) == fields
    assert not plugin.messages


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("gres/mps:101", "mps:101 is more than a GPU has (mps:100), and can never run"),
        ("gres/mps:1K", "mps:1K is more than"),
        ("gres/shard:5", "shard:5 is more than a GPU has (shard:4)"),
        ("gres/mps:10,gres/shard:1", "mps:10 and shard:1: a job has one kind of share"),
        ("gres/mps:10,gres/mps:20", "mps:10 and mps:20: name it once"),
        ("gres/mps:10,gres/gpumem:1G,gres/gpumem:2G", "gpumem:1G and gpumem:2G: name it once"),
        ("gres/gpu:1,gres/gpumem:8G", "gpumem:8G is the memory of a share: add its threads"),
        ("gres/mps:10,gres/gpumem:81G", "gpumem:81G is more than a GPU has (gpumem:80G)"),
        ("gres/mps:a100", "mps:a100 has no number: write it as mps:25"),
        ("gres/mps:2 5", "mps:2 5 has no number"),
        ("gres/mps:25\n", "mps:25\n has no number"),
        ("gres/mps:10,gres/gpumem: 7G", "gpumem: 7G has no number: write it as gpumem:8G"),
        ("gres/mps:10,gres/gpumem", "gpumem has no number"),
    ],
)
def test_what_can_never_run_is_refused(plugin: Plugin, written: str, said: str) -> None:
    answer = plugin.submit({"tres_per_node": written})
    assert isinstance(answer, str)
    assert answer.startswith(f"mpsd: {said}")


def test_an_exclusive_job_has_no_share(plugin: Plugin) -> None:
    """Slurm would never start it, since it gives such a job all GPUs of a node."""
    assert "mps:10 can never run" in str(plugin.submit({"tres_per_node": "gres/mps:10", "shared": 0}))
    assert "comment" in plugin.submit({"tres_per_node": "gres/mps:10", "shared": 2})  # of one user
    assert plugin.submit({"tres_per_node": "gres/gpu:1", "shared": 0}) == {"tres_per_node": "gres/gpu:1", "shared": 0}


@pytest.mark.parametrize("where", ["tres_per_job", "tres_per_socket", "tres_per_task"])
@pytest.mark.parametrize("what", ["gres/mps:25", "gres:shard:1", "cpu:2,gres/gpumem=8G"])
def test_every_field_is_looked_at(plugin: Plugin, where: str, what: str) -> None:
    assert "--gres=" in str(plugin.submit({where: what}))
    assert plugin.submit({where: "gres/gpu:1"}) == {where: "gres/gpu:1"}


FORGED: Final = [
    "mpsd:threads=100,memory=80",
    "  mpsd:threads=100",
    "note MPSD:threads=100 more",
    "mpsmpsd:x d:threads=100",
    "mpsd: threads=100",
    "a,mpsd:threads=100",
    "mpsd:mpsd:threads=100\tmpsd:threads=99\nmpsd:threads=98",
]


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_comment_is_removed(plugin: Plugin, forged: str) -> None:
    """Of a user's own comment nothing is left that could be taken for ours, with a share and without one."""
    job = plugin.submit({"comment": forged})
    assert isinstance(job, dict)
    assert "mpsd:" not in job["comment"].lower()
    job = plugin.submit({"comment": forged, "tres_per_node": "gres/mps:10"})
    assert isinstance(job, dict)
    assert job["comment"].split(" ")[0] == "mpsd:threads=10"
    assert job["comment"].lower().count("mpsd:") == 1


def test_a_user_keeps_its_own_comment(plugin: Plugin) -> None:
    job = plugin.submit({"comment": "for the paper, by mps", "tres_per_node": "gres/mps:10"})
    assert isinstance(job, dict)
    assert job["comment"] == "mpsd:threads=10 for the paper, by mps"


@pytest.mark.parametrize("forged", [*FORGED, "", "another"])
def test_a_change_of_the_comment_keeps_what_was_granted(plugin: Plugin, forged: str) -> None:
    job = plugin.modify("mpsd:threads=10,memory=1024 mine", {"comment": forged})
    assert isinstance(job, dict)
    assert job["comment"].split(" ")[0] == "mpsd:threads=10,memory=1024"
    assert job["comment"].lower().count("mpsd:") == 1
    job = plugin.modify("mine", {"comment": forged})
    assert isinstance(job, dict)
    assert "mpsd:" not in job["comment"].lower()


@pytest.mark.parametrize("field", ["tres_per_node", "tres_per_job", "tres_per_socket", "tres_per_task"])
@pytest.mark.parametrize("written", ["gres/mps:20,gres/gpumem:1G", "gres/gpu:1", ""])
def test_a_share_does_not_change(plugin: Plugin, field: str, written: str) -> None:
    """What Slurm makes of the request is not known then: it may refuse the rest of the change, and keep the comment."""
    said = "mpsd: a job keeps the share of a GPU that it was submitted with: cancel it, and submit another"
    assert plugin.modify("mpsd:threads=10 mine", {field: written}) == said
    assert plugin.modify("mpsd:threads=10 mine", {field: written, "comment": "mpsd:threads=20"}) == said
    assert plugin.modify("mine", {field: written}) == (said if "mps" in written else {field: written})


def test_a_script_that_fails_lets_no_job_pass(plugin: Plugin) -> None:
    """As of an administrator who wrote a number as text, or emptied a table."""
    plugin.module.gpu_memory = "80G"
    assert "job_submit.lua has an error" in str(plugin.submit({"tres_per_node": "gres/mps:10,gres/gpumem:1G"}))
    plugin.module.per_gpu = None
    assert "job_submit.lua has an error" in str(plugin.modify("mine", {"tres_per_node": "gres/gpu:1"}))


def test_other_changes_are_left_alone(plugin: Plugin) -> None:
    assert plugin.modify("mpsd:threads=10", {}) == {}
    assert plugin.modify(None, {}) == {}
