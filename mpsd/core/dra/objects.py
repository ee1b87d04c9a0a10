"""A ResourceClaim from the API server: the fields that the driver reads. Values without behaviour.

Source: `resource.k8s.io/v1`, Kubernetes 1.34. Fields that are not named here are ignored: later releases add some.
"""

from collections.abc import Mapping

from msgspec import Struct


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join("ID" if each == "id" else each.capitalize() for each in rest)


class Metadata(Struct, rename=_camel):
    name: str = ""
    namespace: str = ""
    uid: str = ""


class Consumer(Struct, rename=_camel):
    """An object that a claim is reserved for, usually a pod."""

    resource: str
    name: str
    uid: str


class Opaque(Struct, rename=_camel):
    """Parameters for one driver, whose content the API server does not check."""

    driver: str
    parameters: object = None


class Configuration(Struct, rename=_camel):
    """Parameters of a class or a claim, for some of its requests; for all where it names none."""

    requests: list[str] | None = None
    opaque: Opaque | None = None


class Result(Struct, rename=_camel):
    """A device that was allocated for a request, or a share of one."""

    request: str
    driver: str
    pool: str
    device: str
    share_id: str | None = None
    consumed_capacity: Mapping[str, str | int | float] | None = None
    admin_access: bool | None = None


class Devices(Struct, rename=_camel):
    """All devices of an allocation. The configurations of its classes come before those of the claim."""

    results: list[Result] | None = None
    config: list[Configuration] | None = None


class Allocation(Struct, rename=_camel):
    devices: Devices | None = None


class Status(Struct, rename=_camel):
    allocation: Allocation | None = None
    reserved_for: list[Consumer] | None = None


class ResourceClaim(Struct, rename=_camel):
    """A claim in its current state."""

    metadata: Metadata
    status: Status | None = None
