"""The decision about a compute mode: each case once, by the wanted, recorded, current and previously seen mode."""

from itertools import product

import pytest

from mpsd.core.compute_mode import ComputeMode, ComputeModeStep, command, step, trouble

DEFAULT, THREAD, PROHIBITED, EXCLUSIVE = ComputeMode
NOBODY_KNOWS = None


@pytest.mark.parametrize(
    ("found", "now", "held", "wanted"),
    [
        (None, DEFAULT, False, ComputeModeStep.TAKE),
        (None, THREAD, False, ComputeModeStep.TAKE),
        (None, EXCLUSIVE, False, ComputeModeStep.NOTHING),  # the mode of another program stays
        (None, PROHIBITED, False, ComputeModeStep.NOTHING),
        (None, NOBODY_KNOWS, False, ComputeModeStep.NOTHING),
        (DEFAULT, DEFAULT, False, ComputeModeStep.TAKE),  # mpsd died in between, or the driver was reloaded
        (DEFAULT, EXCLUSIVE, False, ComputeModeStep.NOTHING),
        (DEFAULT, EXCLUSIVE, True, ComputeModeStep.NOTHING),
        # Another program changed it: mpsd reports that, and does not undo it.
        (DEFAULT, DEFAULT, True, ComputeModeStep.NOTHING),
        (DEFAULT, PROHIBITED, True, ComputeModeStep.NOTHING),
        (None, DEFAULT, True, ComputeModeStep.NOTHING),
    ],
)
def test_where_it_is_wanted(
    found: ComputeMode | None,
    now: ComputeMode | None,
    held: bool,  # noqa: FBT001 - a column of the table
    wanted: ComputeModeStep,
) -> None:
    """A wanted mode is set once, where it is not in force; a later change by another program is left."""
    assert step(wanted=True, found=found, now=now, held=held) is wanted


@pytest.mark.parametrize(("found", "held"), list(product([DEFAULT, THREAD], [False, True])))
def test_where_it_is_not_wanted(found: ComputeMode, held: bool) -> None:  # noqa: FBT001 - a table
    """mpsd's own mode is restored, a later foreign mode is left, and without a record nothing is touched."""
    steps = {now: step(wanted=False, found=found, now=now, held=held) for now in (*ComputeMode, NOBODY_KNOWS)}
    assert steps.pop(EXCLUSIVE) is ComputeModeStep.GIVE_BACK
    assert set(steps.values()) == {ComputeModeStep.FORGET}
    for now in (*ComputeMode, NOBODY_KNOWS):
        assert step(wanted=False, found=None, now=now, held=held) is ComputeModeStep.NOTHING


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
