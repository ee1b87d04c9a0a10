"""A user of the generated Python client, run as a program: argv has the client's folder and mpsd's socket.

It prints its results, line by line. It imports nothing of mpsd.
"""

import json
import sys
from datetime import datetime, timedelta
from importlib import import_module
from typing import Any

import httpx

folder, socket = sys.argv[1:]
sys.path.insert(0, folder)
client = import_module("mpsd_client").Client(
    base_url="http://mpsd", raise_on_unexpected_status=True, httpx_args={"transport": httpx.HTTPTransport(uds=socket)}
)
models = import_module("mpsd_client.models")


def call(where: str, *arguments: object, **named: object) -> Any:
    """Return the decoded answer of an operation."""
    return import_module(f"mpsd_client.api.{where}").sync(*arguments, client=client, **named)


def told(what: str, said: object) -> None:
    """Print the subject of a line, and its text."""
    sys.stdout.write(f"{what} {said}\n")


status = call("node.get_status")
told("healthy", status.healthy)
told("total", sum(gpu.memory_total for gpu in call("node.list_gpus").gpus))
told("daemons", [each.name for each in call("daemons.list_daemons").daemons])

for request in (
    models.LeaseOfThreads(threads=25.0, memory="8GiB", name="by threads"),
    models.LeaseOfThreads(threads=5.5, memory=6 * 2**30, name="by bytes"),
    models.LeaseOfFraction(fraction=0.25, labels=models.LeaseOfFractionLabels.from_dict({"team": "blue"})),
):
    lease = call("leases.create_lease", body=request)
    assert isinstance(lease, models.LeaseOut), lease
    assert isinstance(lease.granted, datetime)
    assert lease.granted.utcoffset() == timedelta(0)
    told("granted", f"{lease.state.value} {lease.active_thread_percentage} {lease.pinned_device_mem_limit}")
    assert lease.id in {each.id for each in call("leases.list_leases").leases}
    told("verdict", call("leases.verify_lease", lease.id).verdict.value)
    told("renewed", call("leases.renew_lease", lease.id, body=models.RenewRequest(ttl=600)).expires is not None)
    assert call("leases.release_lease", lease.id) is None

refused = call("leases.create_lease", body=models.LeaseOfThreads(threads=1, memory="999TiB"))
assert isinstance(refused, models.Problem), refused
told("refused", f"{refused.status} {refused.code}")

held = call("daemons.hold_daemon", "gpu1")
told("held", f"{held.verb} {held.state.value}")

query = {"after": "latest", "follow": "true", "heartbeat": "1"}
with client.get_httpx_client().stream("GET", "/v1/events", params=query) as answer:
    resumed = call("daemons.drain_daemon", "gpu1")  # the body is optional
    events = (models.Event.from_dict(json.loads(line)) for line in answer.iter_lines())
    for event in events:
        assert isinstance(event.at, datetime)
        told("event", event.event)
        if event.event == "heartbeat":
            break
kept = import_module("mpsd_client.api.events.read_events").sync_detailed(client=client)
told("kept", len(kept.content.splitlines()) > 0)
