"""The decision about a compute mode: each case once, by the wanted, recorded, current and previously seen mode."""

from itertools import product

from mpsd.core.compute_mode import ComputeMode, command, trouble

DEFAULT, EXCLUSIVE, PROHIBITED = ComputeMode.DEFAULT, ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.PROHIBITED
NOBODY_KNOWS = None


def test_trouble() -> None:
    """A mode that allows no process is a trouble; another mode than the wanted one is, too. Each has its remedy."""
    for wanted, now, held in product([False, True], [*ComputeMode, NOBODY_KNOWS], [False, True]):
        said = trouble(index=3, wanted=wanted, now=now, held=held)
        if now is PROHIBITED:
            assert said is not None
            assert "nvidia-smi -i 3 -c DEFAULT" in said[1]
        elif now is EXCLUSIVE or not wanted:
            assert said is None
        else:
            assert said is not None
            assert "leave" in said[1]
            assert ("reset gpu3" in said[1]) == (now is not NOBODY_KNOWS)
            assert ("changed from outside" in said[0]) == (held and now is not NOBODY_KNOWS)


def test_command() -> None:
    """The modes are spelled as by nvidia-smi."""
    assert command(0, EXCLUSIVE) == "nvidia-smi -i 0 -c EXCLUSIVE_PROCESS"
    assert command(7, DEFAULT) == "nvidia-smi -i 7 -c DEFAULT"
