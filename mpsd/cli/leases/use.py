"""How a program uses a lease that no process uses yet, as a phrase that ends in what to type."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mpsd.cli.leases.calling_process import family, name
from mpsd.cli.users import name_of

if TYPE_CHECKING:
    from mpsd.client import answer_types


def use(lease: "answer_types.Lease") -> str:
    """Say for which programs a lease is, and what to type for them."""
    share = " --share N" if len(lease["gpus"]) > 1 else ""
    shown, owner = f'eval "$(mpsctl show {lease["id"]} -o env{share})"', lease["owner"]
    match lease["holders"][0] if lease["holders"] else None:
        case {"kind": "process", "pid": int(pid)} if _uid(pid) not in {None, owner["uid"]}:
            start = f"setpriv --reuid {owner['uid']} --regid {owner['gid']} --init-groups PROGRAM"
            return f"for a program that runs as {name_of(owner['uid'])}: ({shown}; {start})"
        case {"kind": "process", "pid": int(pid)} if pid in family(os.getppid()):
            return f"for this shell and what it starts: {shown}"
        case {"kind": "process", "pid": int(pid)}:
            return f"in {name(pid)}, for what it starts: {shown}"
        case {"kind": "claim"}:
            return f"with its MPSD_LEASE_TOKEN: mpsctl claim {lease['id']} -- PROGRAM"
        case {"unit": str(group)} | {"container": str(group)} | {"cgroup": str(group)}:
            return f"in {group}, for what it starts: {shown}"
        case _:
            return f"for a program with its environment: {shown}"


def _uid(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
