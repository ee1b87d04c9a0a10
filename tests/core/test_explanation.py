"""What a configuration means for users: each topic has the value of the setting that decides it."""

from typing import Final

import pytest

from mpsd.core.configuration.document import parse
from mpsd.core.configuration.explanation import explain
from mpsd.core.settings import Settings

_USUAL: Final = explain(Settings())


def _differ(text: str) -> set[str]:
    """Return the topics on which a configuration differs from the defaults."""
    return {topic for topic, said in explain(parse(text)).items() if said != _USUAL[topic]}


def test_ten_lines() -> None:
    """Each topic has one line, with something in it."""
    assert len(_USUAL) == 10
    assert all(said and "\n" not in said for said in _USUAL.values())


@pytest.mark.parametrize(
    ("text", "topic", "parts"),
    [
        ('[roles]\nusers = ["%ai", "bob"]\nobservers = ["*"]', "connect", ("%ai, bob", "every user")),
        ("[roles]\nusers = []", "connect", ("no user",)),
        ('[api]\nmode = "0660"\ngroup = "gpu"', "connect", ("0660", "gpu")),
        ('[roles]\nadmins = ["%wheel"]\noperators = ["eve"]', "administer", ("root, %wheel", "eve")),
        ('[daemon]\nusers = "one"', "users", ("one at a time",)),
        ('[daemon]\nusers = "many"', "users", ("several", "fault")),
        ("[admission]\nsmallest_share = 10", "share", ("10 %",)),
        ('[admission]\nmemory_reserve = "2GiB"', "share", ("2GiB",)),
        ("[admission]\nthreads_oversubscription = 1.5", "share", ("1.5",)),
        ('[enforcement]\nattach = "strict"', "share", ("one after another",)),
        ('[quota."*"]\nthreads = 50\nmemory = "40GiB"\ngpu_count = 2', "quota", ("50 %", "40GiB", "2 GPUs")),
        ("[quota.alice]\nleases = 3", "quota", ("alice",)),
        ('[enforcement]\non_expiry = "terminate"', "time", ("ended",)),
        ('[enforcement]\non_violation = "terminate"', "violations", ("ended",)),
        ('[violations]\nmemory = "terminate"', "violations", ("memory (ended)",)),
        ('[enforcement]\nunadmitted = "allow"', "no lease", ("whole GPU",)),
        ('[limits]\nactive_thread_percentage = 20\npinned_device_mem_limit = "2GiB"', "no lease", ("20 %", "2G")),
        ('[daemon]\ncompute_mode = "exclusive-process"', "outside MPS", ("46",)),
    ],
)
def test_topic(text: str, topic: str, parts: tuple[str, ...]) -> None:
    """A setting changes the sentence of its topic, and that one alone."""
    assert _differ(text) == {topic}
    said = explain(parse(text))[topic]
    assert [part for part in parts if part not in said] == []


def test_time_of_a_quota() -> None:
    """The usual quota's time to live is that of every lease."""
    assert "36 h" in explain(parse('[quota."*"]\nttl = 129600'))["time"]
    assert "15 min" in explain(parse('[quota."*"]\nttl = 900'))["time"]


def test_what_is_seen() -> None:
    """Either value of api.open has its sentence."""
    found = {explain(parse(f"[api]\nopen = {value}"))["visible"] for value in ("true", "false")}
    assert len(found) == 2


def test_this_machine() -> None:
    """With `auto`, the machine decides how many users share a GPU; with `one`, it does not."""
    assert len({explain(Settings(), serves_many=each)["users"] for each in (True, False, None)}) == 3
    assert explain(Settings(), serves_many=True)["users"] == explain(parse('[daemon]\nusers = "many"'))["users"]
    one = parse('[daemon]\nusers = "one"')
    assert explain(one, serves_many=True) == explain(one, serves_many=False)
