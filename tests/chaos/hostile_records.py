"""The records of an observer of a node with hostile users: honest users' reports, and events that must not occur."""

import json
from datetime import datetime
from typing import Any, Final

from tests.chaos.chaos import REFUSALS
from tests.chaos.latency import Latency
from tests.chaos.records import Records
from tests.chaos.users import HonestUser

HONEST: Final = {"gpu0": 61401, "gpu1": 61402, "gpu2": 61403}
"""The uid of the honest users of each GPU; one uid for each, since a control daemon serves one at a time."""

NEVER: Final = {
    "api_defect", "lease_not_restored", "file_damaged", "supervisor_stuck", "listener_stuck", "store_set_aside",
    "events_lost", "client_forced", "leases_incomplete", "file_not_stored",
}  # fmt: skip
"""Events that none of these actions may cause; a `client_forced` for a hostile process is legitimate."""

FAULT: Final = "which met a fatal fault"

PER_MINUTE: Final = 3 << 20
"""The most bytes of mpsd's log in a minute that are not about honest users' own leases."""


class HostileRecords(Records):
    """The records of an observer that knows the user of each lease."""

    def __init__(self, node: Any, users: list[HonestUser], latency: Latency) -> None:
        super().__init__(node)
        self.users = users
        self.latency = latency
        self.honest: set[int] = set()
        """The pids of honest users' processes, which policy must never end."""
        self._ended: set[int] = set()
        """The pids of honest users' processes that chaos has ended."""
        self.died: dict[str, datetime] = {}
        """The leases whose holder has ended, with the time."""
        self.outlived: dict[str, tuple[float, str]] = {}
        """By such a lease, the seconds until it ended too, and mpsd's reason."""
        self.bytes: dict[str, int] = {}
        """By minute, the bytes logged beyond what honest users cause."""

    def take_in(self) -> None:
        for user in self.users:
            for each in user.reports():
                self._note_report(user, each)

    def _note_report(self, user: HonestUser, report: dict[str, Any]) -> None:
        match report["kind"]:
            case "granted":
                self.note_grant(report["lease"])
            case "releasing":
                self.given_up.setdefault(report["lease"], "its user gives it back")
            case "released" if report["status"] == 204:
                self.released.add(report["lease"])
            case "request":
                self.latency.note(report)
                fine = {"take": (201,), "release": (204,)}.get(report["what"], (200,))
                refused = report["what"] == "take" and report["code"] in REFUSALS - {"invalid_request"}
                assert report["status"] in fine or refused, f"uid {user.plan.uid} was answered {report}"
                if report["what"] == "look":
                    assert report["state"] in {"granted", "active"}, report

    def look(self, members: Any) -> dict[str, Any]:
        self.take_in()
        self._ended |= {each.pid for each in members if each.may_end}
        return super().look(members)

    def check_leases(self, said: Any) -> None:
        """Check mpsd against every lease, except those that were released during the query."""
        for user in self.users:
            for each in user.is_giving_back():
                self.given_up.setdefault(each, "its user gives it back")
        super().check_leases(said)

    def _note_line(self, line: dict[str, Any]) -> None:
        if line["event"] == "lease_ended" and line["lease"] in self.died:
            took = datetime.fromisoformat(line["at"]) - self.died[line["lease"]]
            self.outlived.setdefault(line["lease"], (took.total_seconds(), line["because"]))
        match line["event"]:
            # A process that has just ended is still in its server's list, and has no lease any more. The end of one in
            # mid-kernel is a fatal fault, which ends the work of all clients of its server.
            case "client_forced" if line["pid"] not in self.honest - self._ended or FAULT in line["because"]:
                self.log.append(line)
            case event if event in NEVER:
                raise AssertionError(f"{line}; the log is {self.node.stderr}")
            case "daemon_state" if line["state"] == "failed":
                raise AssertionError(f"a GPU is given up: {line}; the log is {self.node.stderr}")
            case "uid_quarantined" if line["uid"] in HONEST.values():
                raise AssertionError(f"an honest user is shut out: {line}; the log is {self.node.stderr}")
            case _:
                super()._note_line(line)
        if not line["event"].startswith("lease_") or line.get("uid") not in HONEST.values():
            minute = line["at"][:16]
            self.bytes[minute] = self.bytes.get(minute, 0) + len(json.dumps(line))
            assert self.bytes[minute] <= PER_MINUTE, (
                f"{minute}: {self.bytes[minute]} bytes; the log is {self.node.stderr}"
            )
