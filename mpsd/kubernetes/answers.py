"""The answer to kubelet for a container: its variables, its mounts, and the devices of its GPU."""

import base64
import binascii
from collections.abc import Mapping
from typing import Final

from google.protobuf.message import DecodeError

from mpsd.core.containers.cdi import PIPE_DIRECTORY, WITHOUT_SHARED_FILES
from mpsd.core.kubernetes.devices import Gpu
from mpsd.core.kubernetes.settings import GpuDevices, Settings, SharedMemory
from mpsd.kubernetes.protocol import deviceplugin_pb2 as deviceplugin

ALLOCATION: Final = "MPSD_ALLOCATION"
"""The variable that distinguishes the processes of a container from those of other containers of its pod."""

_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - where POSIX shared memory is, shm_overview(7)


def answer(variables: Mapping[str, str], gpu: Gpu, settings: Settings) -> deviceplugin.ContainerAllocateResponse:
    """Return the answer for a container with these variables.

    The only node directory in it is its GPU's pipe directory.
    """
    response = deviceplugin.ContainerAllocateResponse(envs=dict(variables))
    directory = variables.get(PIPE_DIRECTORY)
    if directory is not None:
        response.mounts.add(container_path=directory, host_path=directory, read_only=True)
        if shares_memory(gpu, settings):
            response.mounts.add(container_path=_SHARED_MEMORY, host_path=_SHARED_MEMORY, read_only=False)
        device = settings.cdi_device.format(uuid=gpu.uuid)
        match settings.gpu_devices:
            case GpuDevices.ENVIRONMENT:
                response.envs["NVIDIA_VISIBLE_DEVICES"] = gpu.uuid
            case GpuDevices.CDI_FIELD:
                response.cdi_devices.add(name=device)
            case GpuDevices.CDI_ANNOTATION:
                response.annotations["cdi.k8s.io/mpsd"] = device
            case GpuDevices.NONE:
                pass
    return response


def variables_of(encoded: str) -> dict[str, str]:
    """Return the variables of an answer in kubelet's checkpoint; empty for another text."""
    try:
        raw = base64.b64decode(encoded, validate=True)
        return dict(deviceplugin.ContainerAllocateResponse.FromString(raw).envs)
    except (binascii.Error, DecodeError):
        return {}


def shares_memory(gpu: Gpu, settings: Settings) -> bool:
    """Tell whether a container gets the machine's /dev/shm."""
    if settings.shared_memory is SharedMemory.AUTO:
        return gpu.driver is None or gpu.driver < WITHOUT_SHARED_FILES
    return settings.shared_memory is SharedMemory.ALWAYS
