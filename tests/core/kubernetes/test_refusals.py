"""The words of a refusal for the author of a pod."""

import pytest

from mpsd.core.errors import (
    ConfigurationError,
    DaemonNotReadyError,
    DoesNotFitError,
    MpsdError,
    NotPermittedError,
    UnreachableError,
    catalogue,
)
from mpsd.core.kubernetes import refusals
from mpsd.core.kubernetes.devices import Part
from mpsd.core.kubernetes.refusals import Taken

LEASE = "lease-0123456789"


def answered(kind: type[MpsdError], detail: str, limit: str | None = None) -> MpsdError:
    """Return an error as mpsd's answer brings it."""
    error = kind(detail, hint=f"see mpsctl leases; {LEASE} (secret, uid 0) has 50 %", limit=limit)
    error.is_answer = True
    return error


@pytest.mark.parametrize("kind", catalogue())
def test_every_error(kind: type[MpsdError]) -> None:
    """No words for kubelet have a percent sign, a lease, or a command of mpsctl."""
    error = answered(kind, f"{LEASE} has 62.5 % of 40%, and lease-9876543210 the rest")
    text = refusals.told(error, {LEASE: "team/train"}, [Taken("team/train", Part(625, 1024)), Taken("", Part(125, 8))])
    assert not any(each in text for each in ("%", "lease-", "mpsctl", "secret"))
    assert text.startswith(
        "the share of pod team/train has 62.5 percent of 40 percent, and the share of a user outside Kubernetes the"
        " rest; pod team/train has 62.5 percent and 1GiB; a user outside Kubernetes has 12.5 percent and 8MiB"
    )


def test_several_holders() -> None:
    """The largest pods are named, each once, and what no pod has."""
    taken = [Taken(f"team/{number}", Part(number, number)) for number in range(1, 9)]
    taken += [Taken("team/8", Part(10, 8)), Taken("", Part(1, 1)), Taken("", Part(1, 1))]
    text = refusals.told(answered(DoesNotFitError, "too much"), {}, taken)
    assert text.startswith(
        "too much; pod team/8 has 1.8 percent and 16MiB; pod team/7 has 0.7 percent and 7MiB; pod team/6 has 0.6"
        " percent and 6MiB; a user outside Kubernetes has 0.2 percent and 2MiB [does_not_fit]; request less"
    )


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (answered(DaemonNotReadyError, "gpu0 is held", "hold"), "only an operator can change it"),
        (answered(DaemonNotReadyError, "gpu0 is busy"), "it is tried again"),
        (answered(DoesNotFitError, "too much", "threads"), "request less"),
        (answered(DoesNotFitError, "uid 1001 has 10 %", "user"), "request another node"),
        (answered(NotPermittedError, "no"), "ask an operator of the cluster"),
        (UnreachableError("mpsd is away", hint="mpsctl status"), "it is tried again"),
        (ConfigurationError("no record", hint="see kubelet_dir"), "see kubelet_dir"),
    ],
)
def test_hints(error: MpsdError, hint: str) -> None:
    """The hint is for the author of a pod; that of mpsd-kubernetes itself stays."""
    assert hint in refusals.told(error, {})
