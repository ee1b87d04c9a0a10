"""The job of one user: the GPUs that it may use, the GPU of each rank, and the share that ranks get. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Final

from mpsd.core import gpu_names
from mpsd.core.errors import InvalidRequestError
from mpsd.core.units import briefly, format_size

_NONE: Final = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES without a GPU. Source: the CUDA programming guide; Slurm sets the last one."""

_NO_GPU: Final = "ask the batch system for a GPU (srun --gpus), or set CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class JobGpu:
    """A GPU that a job may use."""

    index: int
    uuid: str
    name: str
    node: int | None = None
    """The NUMA node of its PCI device; None where the kernel names none."""


def visible(text: str | None, gpus: Sequence[JobGpu], *, by_bus: bool) -> list[JobGpu]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names; None: all.

    `by_bus`: whether CUDA_DEVICE_ORDER is PCI_BUS_ID, the order of NVML. CUDA's own order of different GPUs is not
    known without CUDA. Raises InvalidRequestError where no GPU is left, and for what mpsd cannot supervise.
    """
    if text is None:
        found = [*gpus]
    elif text.strip() in _NONE:
        raise InvalidRequestError(
            f"CUDA_VISIBLE_DEVICES is {text.strip()!r}, so that the job may see no GPU", hint=_NO_GPU, limit="gpus"
        )
    else:
        found = _named("CUDA_VISIBLE_DEVICES", text, gpus)
        if any(each.strip().isdecimal() for each in text.split(",")) and not by_bus and _differ(gpus):
            raise InvalidRequestError(
                f"CUDA_VISIBLE_DEVICES is {briefly(text)}, and the GPUs here differ, so that numbers depend on"
                " CUDA_DEVICE_ORDER",
                hint="export CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the GPUs by UUID (nvidia-smi -L)",
                limit="gpus",
            )
    if not found:
        raise InvalidRequestError("there is no GPU for the job", hint=_NO_GPU, limit="gpus")
    return found


def _differ(gpus: Sequence[JobGpu]) -> bool:
    return len({each.name for each in gpus}) > 1


def _named(source: str, text: str, gpus: Sequence[JobGpu]) -> list[JobGpu]:
    by_index = {each.index: each for each in gpus}
    found = []
    for each in filter(None, map(str.strip, text.split(","))):
        if each.lower().startswith("mig"):
            raise InvalidRequestError(
                f"{briefly(each)} is a MIG instance, and mpsd supervises whole GPUs",
                hint="ask the batch system for a whole GPU",
                limit="gpus",
            )
        index = gpu_names.find(each, [(gpu.index, gpu.uuid) for gpu in gpus])
        if index is None:
            numbers = ", ".join(f"{gpu.index}" for gpu in gpus)
            raise InvalidRequestError(
                f"{source} names {briefly(each)}, and the job may see no such GPU",
                hint=f"choose {numbers}, or a UUID: nvidia-smi -L" if gpus else _NO_GPU,
                limit="gpus",
            )
        found.append(by_index[index])
    return list(dict.fromkeys(found))


def check_gpus(text: str, count: int | None) -> None:
    """Refuse a `--gpus` that no node can satisfy, or none with `count` GPUs, which is None where it is not known.

    Raises InvalidRequestError.
    """
    names = [*filter(None, map(str.strip, text.split(",")))]
    if text != "all" and (text == "0" or not names or not all(map(gpu_names.is_name, names))):
        raise InvalidRequestError(
            f"--gpus {briefly(text)} names no GPU",
            hint="give all, a number of GPUs, such as 2, or a list, such as 0,2 or UUIDs (nvidia-smi -L)",
            limit="gpus",
        )
    if count is not None and not any(map(gpu_names.is_uuid, names)):
        chosen(text, [JobGpu(index, "", "") for index in range(count)])


def chosen(text: str, gpus: Sequence[JobGpu]) -> list[JobGpu]:
    """Return the GPUs that `--gpus` names, of those that the job may see: `all`, a number of GPUs, or a list.

    A number alone is a number of GPUs, and one with a comma the number of a GPU. Raises InvalidRequestError.
    """
    check_gpus(text, None)
    if text == "all":
        return [*gpus]
    if not text.isdecimal():
        return _named("--gpus", text, gpus)
    if int(text) > len(gpus):
        raise InvalidRequestError(
            f"--gpus {briefly(text)} is not from 1 to {len(gpus)}, the number of GPUs that the job may see",
            hint=f"choose a number up to {len(gpus)}, or a list, such as --gpus {gpus[0].index},",
            limit="gpus",
        )
    return [*gpus][: int(text)]


def spread(ranks: Mapping[int, frozenset[int]], gpus: Sequence[JobGpu]) -> dict[int, JobGpu]:
    """Return the GPU of each rank, by its local number.

    `ranks` has the NUMA nodes of the processors that each rank may use. The nearest GPU is taken where every rank is on
    one node that has GPUs, and all GPUs get equally many ranks then, or one more. Otherwise ranks are spread in blocks.
    Raises InvalidRequestError for fewer ranks than GPUs: a rank would have to use several.
    """
    if len(ranks) < len(gpus):
        raise InvalidRequestError(
            f"{_ranks(len(ranks))} for {len(gpus)} GPUs means that a rank uses several, and under MPS a rank uses one",
            hint=f"take as many GPUs as ranks: --gpus {len(ranks)}",
            limit="gpus",
        )
    near, taken = dict[int, JobGpu](), Counter[str]()
    for rank in sorted(ranks):
        there = [each for each in gpus if each.node is not None and ranks[rank] == {each.node}]
        if there:
            near[rank] = min(there, key=lambda each: taken[each.uuid])
            taken[near[rank].uuid] += 1
    counts = [taken[each.uuid] for each in gpus]
    if len(near) == len(ranks) and max(counts) - min(counts) <= 1:
        return near
    return {rank: gpus[place * len(gpus) // len(ranks)] for place, rank in enumerate(sorted(ranks))}


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def share(ranks: int | None, *, threads: float | None, memory: int | None, even: bool, free: int) -> dict[str, object]:
    """Return the request for the lease of the ranks on one GPU, of which `free` bytes are free.

    Without a share, each rank may use all of the GPU. `threads` (percent) and `memory` (bytes) are those of one rank.
    Raises InvalidRequestError where their number has to be known, and where the parts exceed the GPU.
    """
    if not even and memory is None:
        if threads is None:
            return {"fraction": 1.0, "processes": "any"}
        return {"threads": threads, "memory": _whole(free), "processes": "any"}
    each = memory or 0
    if ranks is None:
        raise InvalidRequestError(
            "the number of ranks is not known, and equal parts depend on it",
            hint="say it: --processes N",
            limit="processes",
        )
    if even:
        return {"fraction": 1.0, "processes": ranks}
    percent = min(floor(1000 / ranks) / 10, 100.0) if threads is None else threads
    if percent * ranks > 100:  # noqa: PLR2004 - percent
        raise InvalidRequestError(
            f"{_ranks(ranks)} on a GPU with {percent:g} % each are more than its threads, and with --memory their parts"
            " are counted",
            hint=f"--threads {floor(1000 / ranks) / 10:g}, or leave --memory out: then each rank may use its percentage"
            " beside the others",
            limit="threads",
        )
    if each * ranks > free:
        raise InvalidRequestError(
            f"{_ranks(ranks)} on a GPU with {format_size(each)} each are more than the {format_size(free)} that are"
            " free of it",
            hint="start fewer ranks, or give each less: --memory SIZE",
            limit="memory",
        )
    return {"threads": percent * ranks, "memory": each * ranks, "processes": ranks}


def _whole(memory: int) -> int:
    """Return memory in whole MiB, rounded down."""
    return memory >> 20 << 20


def placed(ranks: Mapping[int, JobGpu]) -> str:
    """Say which ranks are on which GPU."""
    by_gpu = dict[int, list[int]]()
    for rank, gpu in sorted(ranks.items()):
        by_gpu.setdefault(gpu.index, []).append(rank)
    return ", ".join(f"{_numbers(numbers)} on GPU {index}" for index, numbers in sorted(by_gpu.items()))


def _numbers(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"rank {first}"
    if len(numbers) == last - first + 1:
        return f"ranks {first} to {last}"
    return f"ranks {', '.join(map(str, numbers))}"
