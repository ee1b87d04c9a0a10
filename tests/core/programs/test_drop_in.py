"""The drop-in of a unit with a lease: systemd reads exactly the requested options, whatever they contain."""

import shlex
from math import inf
from pathlib import PurePosixPath

import pytest

from mpsd.core.errors import InvalidRequestError
from mpsd.core.programs import drop_in
from mpsd.core.programs.drop_in import OnRestart

PROGRAM = PurePosixPath("/opt/my tools/mpsctl")


def rendered(*options: str, on_restart: OnRestart = OnRestart.RENEW, end_clients: bool = False) -> str:
    return drop_in.render(PROGRAM, options, on_restart, end_clients=end_clients, start_seconds="")


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("train", "train.service"),
        ("train.service", "train.service"),
        ("ollama@llama.7b", "ollama@llama.7b.service"),
        (r"dev-disk\x2dby", r"dev-disk\x2dby.service"),
    ],
)
def test_names(name: str, full: str) -> None:
    """The name of a service may omit its suffix."""
    assert drop_in.service_name(name) == full


@pytest.mark.parametrize(
    ("pause", "steps", "longest", "held"),
    [
        (0.1, 0, inf, 60.1),
        (5.0, 3, inf, 65.0),  # without a longest pause it does not grow
        (5.0, 0, 600.0, 65.0),
        (5.0, 3, 600.0, 660.0),
        (5.0, 3, 1.0, 65.0),
        (0.0, 3, 600.0, 60.0),
        (999_940.0, 0, inf, 1e6),
    ],
)
def test_how_long_it_is_held(pause: float, steps: int, longest: float, held: float) -> None:
    """A lease that is kept over a restart is held for the longest pause of the unit, plus a minute."""
    assert drop_in.seconds_held(pause, steps, longest) == held


@pytest.mark.parametrize(("pause", "steps", "longest"), [(inf, 0, inf), (1e6, 0, inf), (1.0, 2, 2e6)])
def test_held_too_long(pause: float, steps: int, longest: float) -> None:
    """A pause longer than a claim may wait is refused, with a hint."""
    with pytest.raises(InvalidRequestError, match="may pause for") as refusal:
        drop_in.seconds_held(pause, steps, longest)
    assert "--on-restart renew" in refusal.value.hint


@pytest.mark.parametrize(
    "name", ["", "a b", "../train", "train\n", "é", "x" * 250, "user.slice", "docker-1.scope", ".a"]
)
def test_odd_names(name: str) -> None:
    """A name that is no service is refused before it becomes a path."""
    with pytest.raises(InvalidRequestError):
        drop_in.service_name(name)


def test_nothing_of_another_job() -> None:
    """The unit has no variable of MPS by its manager's environment that its lease does not have."""
    unset = "UnsetEnvironment=CUDA_MPS_CLIENT_PRIORITY CUDA_MPS_PROTOCOL_VERSION CUDA_MPS_SM_PARTITION"
    assert unset in rendered("--fraction", "0.5").splitlines()
    asked = rendered("--fraction", "0.5", "--client-priority", "1").splitlines()
    assert unset.replace(" CUDA_MPS_CLIENT_PRIORITY", "").replace("=CUDA_MPS_CLIENT_PRIORITY ", "=") in asked


@pytest.mark.parametrize("word", ["100%", "$HOME", "two words", 'say "hello"', "it's", "back\\slash", "a;b", ";", ""])
def test_options_are_literal(word: str) -> None:
    """No part of an option acts as a specifier, a variable, a quote or a command's end for systemd."""
    (line,) = [each for each in rendered("--name", word).splitlines() if each.startswith("ExecStartPre=+")]
    taken = shlex.split(line.removeprefix("ExecStartPre=+"))  # shlex quotes as systemd does, as far as render uses that
    assert taken[0] == str(PROGRAM)
    assert taken[-2:] == ["--name", word.replace("%", "%%").replace("$", "$$")]


@pytest.mark.parametrize("word", ["a\nExecStart=/bin/sh", "bell\a", "\x7f"])
def test_control_characters(word: str) -> None:
    """No option begins a new line."""
    with pytest.raises(InvalidRequestError, match="control character"):
        rendered("--name", word)


def test_whose_it_is() -> None:
    """A drop-in that another program wrote is recognised as such."""
    assert drop_in.is_written_here(rendered("--fraction", "0.25"))
    assert not drop_in.is_written_here("[Service]\nExecStart=\n")


def test_ends_clients_only_where_wanted() -> None:
    """A unit stops as before, unless its clients must be ended first."""
    assert "ExecStop=" not in rendered()
    assert "ExecStop=-+" in rendered(end_clients=True)
