"""Each name of a GPU, or of its control daemon, is understood by every command that takes one."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import click
import pytest

from mpsd.cli.group import mpsctl
from mpsd.core import gpu_names
from mpsd.core.errors import InvalidRequestError
from tests.node import Node

COMMANDS: Final[dict[str, Sequence[str]]] = {
    "admit gpu": ("admit", "--threads", "1", "--memory", "64MiB", "--gpu"),
    "clients gpu": ("clients", "--gpu"),
    "drain daemon": ("drain", "--no-wait"),
    "events daemon": ("events", "--daemon"),
    "events gpu": ("events", "--gpu"),
    "explain subject": ("explain",),
    "hold daemon": ("hold",),
    "leases gpu": ("leases", "--gpu"),
    "reset daemon": ("reset",),
    "restart daemon": ("restart", "--no-wait"),
    "resume daemon": ("resume",),
    "usage gpu": ("usage", "--gpu"),
    "verify canary": ("verify", "--canary"),
}
"""The commands with a GPU or a control daemon, each up to its name."""

AS_ADMIT: Final = frozenset({"container run gpu", "run gpu", "service unit-start gpu", "service wrap gpu", "shell gpu"})


def taking(group: click.Group = mpsctl, above: str = "") -> Iterator[str]:
    """Yield each command with each of its parameters that takes a GPU or a control daemon."""
    context = click.Context(mpsctl)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from taking(command, f"{name} ")
        elif command is not None:
            found = (f"{each.name}" for each in command.params)
            yield from (f"{above}{name} {each}" for each in found if each in {"gpu", "daemon", "canary", "subject"})


def test_all_commands() -> None:
    """No command with a GPU or a control daemon is missing here."""
    assert {*taking()} == {*COMMANDS} | AS_ADMIT


@pytest.fixture
def used(node: Node) -> Iterator[Node]:
    """Return the node with a lease on GPU 1; its control daemons are resumed afterwards."""
    node.request("POST", "/v1/leases", {"threads": 1, "memory": "64MiB", "gpu": "gpu1"})
    yield node
    assert node.mpsctl("resume", "--all").returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_each_name(used: Node, command: str) -> None:
    """The index, the control daemon's name and the UUID mean the same; the refusal of another name lists them."""

    def said(name: str) -> list[Any]:
        done = used.mpsctl(*COMMANDS[command], name, "-o", "json")
        assert done.stderr == "", name
        assert done.returncode == 0 or command == "verify canary", name
        texts = [done.stdout] if done.stdout.startswith("{\n") else done.stdout.splitlines()
        return [lasting(json.loads(each)) for each in texts]

    uuid = used.get("/v1/gpus").json["gpus"][1]["uuid"]
    first = said("1")
    for name in ("gpu1", "GPU1", uuid, uuid.lower()):
        assert said(name) == first, name
    assert said("0") != first or command in {"clients gpu", "usage gpu"}
    # A digit may also be the beginning of a lease's id, which `explain` takes.
    for nothing in ("gpu9", "GPU-9", *(["9"] if command != "explain subject" else [])):
        done = used.mpsctl(*COMMANDS[command], nothing)
        assert done.returncode not in {0, 75}, nothing
        assert nothing in done.stderr
        assert "gpu0" in done.stderr
        assert "gpu1" in done.stderr


def lasting(answer: Any) -> Any:
    """Return the part of an answer that does not depend on when it was given."""
    match answer:
        case {"daemon": daemon}:
            return daemon
        case {"history": history}:
            return [each["key"] for each in history]
        case {"about": about}:
            return about
        case _:
            return answer


def test_the_history_of_a_gpu(used: Node) -> None:
    """A program names a GPU in the same ways; the history of a GPU that is gone is found by its UUID."""
    uuid = used.get("/v1/gpus").json["gpus"][1]["uuid"]
    for name in ("1", "gpu1", uuid):
        assert [each["key"] for each in used.get(f"/v1/history?by=gpu&gpu={name}").json["history"]] == [uuid], name
    assert used.get("/v1/history?by=gpu&gpu=GPU-gone").json["history"] == []
    refused = used.get("/v1/history?by=gpu&gpu=gpu9")
    assert (refused.status, refused.json["limit"]) == (422, "gpu")


GPUS: Final = [(0, "GPU-8f2a0c11"), (1, "GPU-8f2b0c11"), (2, "GPU-91aa0c11"), (3, None)]


@pytest.mark.parametrize(
    ("meant", "index"),
    [
        *(("GPU-9", 2), ("gpu-8F2B", 1), ("GPU-8f2a0c11", 0), (" 3 ", 3), ("gpu 3", 3)),
        *((each, None) for each in ("GPU-", "", "00", "-1", "gpu", "gpu4", "8f2b", "MIG-8f2b", "٣", "GPU-91aa0c112")),
    ],
)
def test_beginnings(meant: str, index: int | None) -> None:
    """A unique beginning of a UUID names its GPU, as in CUDA_VISIBLE_DEVICES; other texts name none."""
    assert gpu_names.find(meant, GPUS) == index


def test_a_beginning_of_several() -> None:
    """A beginning that several UUIDs share is refused with those."""
    with pytest.raises(InvalidRequestError, match="several UUIDs") as refused:
        gpu_names.find("GPU-8f2", GPUS)
    assert refused.value.hint == "choose GPU-8f2a0c11 (GPU 0), GPU-8f2b0c11 (GPU 1)"
