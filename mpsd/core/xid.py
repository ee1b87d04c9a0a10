"""What the errors that a GPU reports mean for those who share it. Pure."""

from typing import Final

APPLICATION: Final = {
    13: "graphics engine exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "preemptive cleanup, after an error before it",
    68: "video processor exception",
    109: "context switch timeout",
}
"""Xids that a program brings about by itself, and after which the GPU is as good as before.

Source: those that NVIDIA's device plugin for Kubernetes does not take a GPU out of service for; the words are those of
NVIDIA's list "XID Errors".
"""


def describe(xid: int) -> str:
    """Say what an Xid is, and whose."""
    known = APPLICATION.get(xid)
    return f"Xid {xid} ({known})" if known is not None else f"Xid {xid}, which no program brings about"


def condemns(xid: int) -> bool:
    """Tell whether a GPU is not to be given out after this."""
    return xid not in APPLICATION
