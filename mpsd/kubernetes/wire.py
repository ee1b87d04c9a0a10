"""gRPC over unix sockets: descriptions of the calls, sockets that serve them, and a client.

protoc's plugin for gRPC would generate twice this amount of code, tied to one version of grpcio.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import grpc
from google.protobuf.message import Message

from mpsd.kubernetes.protocol import deviceplugin_pb2 as deviceplugin
from mpsd.kubernetes.protocol import dra_pb2 as dra
from mpsd.kubernetes.protocol import drahealth_pb2 as drahealth
from mpsd.kubernetes.protocol import pluginregistration_pb2 as registration
from mpsd.kubernetes.protocol import podresources_pb2 as podresources

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)

DEADLINE: Final = 10.0
"""Timeout in seconds for an answer of kubelet."""


@dataclass(frozen=True, slots=True)
class Call(Generic[Q, A]):
    service: str
    name: str
    request: type[Q]
    answer: type[A]
    is_stream: bool = False
    """Whether it has several answers."""

    @property
    def path(self) -> str:
        """Its name in a request."""
        return f"/{self.service}/{self.name}"


REGISTER: Final = Call("v1beta1.Registration", "Register", deviceplugin.RegisterRequest, deviceplugin.Empty)

_PLUGIN: Final = "v1beta1.DevicePlugin"
OPTIONS: Final = Call(_PLUGIN, "GetDevicePluginOptions", deviceplugin.Empty, deviceplugin.DevicePluginOptions)
WATCH: Final = Call(_PLUGIN, "ListAndWatch", deviceplugin.Empty, deviceplugin.ListAndWatchResponse, is_stream=True)
PREFER: Final = Call(
    _PLUGIN, "GetPreferredAllocation", deviceplugin.PreferredAllocationRequest, deviceplugin.PreferredAllocationResponse
)
ALLOCATE: Final = Call(_PLUGIN, "Allocate", deviceplugin.AllocateRequest, deviceplugin.AllocateResponse)
PRE_START: Final = Call(
    _PLUGIN, "PreStartContainer", deviceplugin.PreStartContainerRequest, deviceplugin.PreStartContainerResponse
)

LIST_PODS: Final = Call(
    "v1.PodResourcesLister", "List", podresources.ListPodResourcesRequest, podresources.ListPodResourcesResponse
)

_REGISTRATION: Final = "pluginregistration.Registration"
GET_INFO: Final = Call(_REGISTRATION, "GetInfo", registration.InfoRequest, registration.PluginInfo)
NOTIFY: Final = Call(
    _REGISTRATION, "NotifyRegistrationStatus", registration.RegistrationStatus, registration.RegistrationStatusResponse
)

DRA_SERVICES: Final = ("k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin", "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin")
"""The newest first; their messages are the same."""


def prepare(service: str) -> Call[dra.NodePrepareResourcesRequest, dra.NodePrepareResourcesResponse]:
    """Return the call with which one of these services prepares claims."""
    return Call(service, "NodePrepareResources", dra.NodePrepareResourcesRequest, dra.NodePrepareResourcesResponse)


def unprepare(service: str) -> Call[dra.NodeUnprepareResourcesRequest, dra.NodeUnprepareResourcesResponse]:
    """Return the call with which one of these services unprepares claims."""
    return Call(
        service, "NodeUnprepareResources", dra.NodeUnprepareResourcesRequest, dra.NodeUnprepareResourcesResponse
    )


HEALTH_SERVICES: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""The newest first; the older one has the same messages without some fields."""


def watch_health(service: str) -> Call[drahealth.NodeWatchResourcesRequest, drahealth.NodeWatchResourcesResponse]:
    """Return the call by which one of these services tells the health of devices."""
    request, answer = drahealth.NodeWatchResourcesRequest, drahealth.NodeWatchResourcesResponse
    return Call(service, "NodeWatchResources", request, answer, is_stream=True)


Handlers = Mapping[Call[Any, Any], Callable[[Any, grpc.ServicerContext], Any]]
"""The handler of each call: it receives the request, and returns the answer or yields several."""


def serve(path: Path, handlers: Handlers, threads: int) -> grpc.Server:
    """Serve calls on a unix socket that only root may use, replacing the socket of an earlier process.

    Raises OSError where the socket cannot be made.
    """
    server = grpc.server(ThreadPoolExecutor(threads), options=[("grpc.so_reuseport", 0)])
    by_service: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
    for call, handler in handlers.items():
        make = grpc.unary_stream_rpc_method_handler if call.is_stream else grpc.unary_unary_rpc_method_handler
        method = make(handler, call.request.FromString, call.answer.SerializeToString)
        by_service.setdefault(call.service, {})[call.name] = method
    for service, methods in by_service.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    path.unlink(missing_ok=True)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise OSError(f"no socket can be made at {path}: {error}") from None
    path.chmod(0o600)
    server.start()
    return server


class Inode(NamedTuple):
    """The identity of a file at a path; an inode number alone may be reused."""

    device: int
    number: int
    changed: int


def inode(path: Path) -> Inode | None:
    """Return the identity of the file at a path; None where there is none."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Inode(found.st_dev, found.st_ino, found.st_ctime_ns)


class Socket:
    """A socket that is made again if it is removed."""

    def __init__(self, path: Path, handlers: Handlers, threads: int) -> None:
        self.path: Final = path
        self._handlers = handlers
        self._threads = threads
        self._server: grpc.Server | None = None
        self._own: Inode | None = None

    def serve(self) -> bool:
        """Serve, if that is not so already, and return whether that was necessary. Raises OSError."""
        if self._own is not None and inode(self.path) == self._own:
            return False
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        self._server = serve(self.path, self._handlers, self._threads)
        self._own = inode(self.path)
        return True

    def close(self) -> None:
        """End the open calls, and remove the socket, unless another process has made its own there."""
        if self._server is not None:
            self._server.stop(None)
            if inode(self.path) == self._own:
                self.path.unlink(missing_ok=True)
            self._server = self._own = None


def ask(path: Path, call: Call[Q, A], request: Q, *, deadline: float = DEADLINE) -> A:
    """Make a call on a unix socket, and return its answer. Raises grpc.RpcError.

    Each call connects anew: gRPC would let one fail by itself for a second after another could not connect.
    """
    with grpc.insecure_channel(f"unix:{path}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = channel.unary_unary(call.path, call.request.SerializeToString, call.answer.FromString)
        answer: A = stub(request, timeout=deadline)
        return answer


def because(error: grpc.RpcError) -> str:
    """Return why a call failed, for output."""
    details = error.details() if isinstance(error, grpc.Call) else None
    return details or str(error)
