"""The control group that kubelet makes for a pod. Pure.

Source: kubelet's naming, with the drivers `cgroupfs` and `systemd`, for the classes guaranteed (without a directory of
its own), burstable and besteffort. kubelet makes the group before it creates the pod's first container, and removes it
when the pod's last process has ended. Only root makes groups there; elsewhere any user may give a group of its own the
name of a pod's.
"""

import re
from typing import Final

_UID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}")
"""The uid of a pod from the API server, and of one from a file, which has a hash."""

_NAME: Final = re.compile(r"pod([0-9a-f_-]+)(?:\.slice)?\Z")

_CLASSES: Final = ("", "burstable", "besteffort")


def groups(pod: str, root: str) -> list[str]:
    """Return the possible paths of a pod's control group, below kubelet's `root`; empty for a text that is no uid."""
    if not _UID.fullmatch(pod):
        return []
    parts = [part for part in root.split("/") if part]
    top = "/".join(["", *parts, "kubepods"])
    found = [f"{top}/{each}/pod{pod}".replace("//", "/") for each in _CLASSES]
    for each in _CLASSES:
        names = [*parts, "kubepods", *filter(None, [each]), f"pod{pod.replace('-', '_')}"]
        found.append("".join(f"/{'-'.join(names[:end])}.slice" for end in range(1, len(names) + 1)))
    return found


def pod_of(path: str, root: str) -> str | None:
    """Return the uid of the pod whose own control group this is; None for any other group, also one below it."""
    name = _NAME.search(path)
    uid = "" if name is None else name[1].replace("_", "-")
    return uid if path in groups(uid, root) else None
