"""The lines of Slurm's configuration for the shares of a node. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from mpsd.core.slurm.check import HEALTH, HOOKS, call
from mpsd.core.slurm.configuration import Configuration
from mpsd.core.units import MIB

PER_GPU: Final = {"mps": 100, "shard": 4}
"""How many of each a GPU has."""

MEMORY: Final = "gpumem"
"""The countable resource for memory."""

_EVERY: Final = 60


class Device(NamedTuple):
    """A GPU of the node."""

    file: str
    """Its device file, such as /dev/nvidia0."""
    memory: int
    """Bytes."""


def of_slurm(node: str, devices: Sequence[Device], kind: str, hooks: str, present: Configuration) -> Iterator[str]:
    """Yield the lines for slurm.conf, which keep what the site has in those that they replace, and its own scripts."""
    types = [each for each in present.words("GresTypes") if each not in {*PER_GPU, "gpu", MEMORY}]
    yield f"GresTypes={','.join(['gpu', kind, MEMORY, *types])}"
    flags = [each for each in present.value("PrologFlags").split(",") if each and each.lower() != "contain"]
    yield f"PrologFlags={','.join(['Contain', *flags])}"
    for name, program in {**HOOKS, "HealthCheckProgram": HEALTH}.items():
        wanted = f"{hooks}/{program}"
        others = [each for each in present.all(name) if each != wanted]
        yield f"# {name}={others[-1]} stays: {call(others[-1], wanted)}" if others else f"{name}={wanted}"
    yield f"HealthCheckInterval={present.number('HealthCheckInterval', 0) or _EVERY}"
    yield "ProctrackType=proctrack/cgroup"
    tasks = [each for each in present.words("TaskPlugin") if each not in {"task/cgroup", "task/none"}]
    yield f"TaskPlugin={','.join([*tasks, 'task/cgroup'])}"
    plugins = [each for each in present.words("JobSubmitPlugins") if each != "lua"]
    yield f"JobSubmitPlugins={','.join([*plugins, 'lua'])}"
    memory = sum(each.memory for each in devices) // MIB
    yield (
        f"# On the line of the node: NodeName={node} ..."
        f" Gres=gpu:{len(devices)},{kind}:{PER_GPU[kind] * len(devices)},{MEMORY}:{memory}M"
    )


def of_gres(node: str, devices: Sequence[Device], kind: str) -> Iterator[str]:
    """Yield the lines for gres.conf."""
    for each in devices:
        yield f"NodeName={node} Name=gpu File={each.file}"
    flags = " Flags=all_sharing" if len(devices) > 1 else ""
    for each in devices:
        yield f"NodeName={node} Name={kind} Count={PER_GPU[kind]} File={each.file}{flags}"
    yield f"NodeName={node} Name={MEMORY} Count={sum(each.memory for each in devices) // MIB}M Flags=CountOnly"


def of_script(folder: str, devices: Sequence[Device]) -> str:
    """Return a job_submit.lua that calls ours; the memory of a GPU is stated where all have the same."""
    sizes = {each.memory for each in devices}
    size = f"mpsd.gpu_memory = {sizes.pop()} -- bytes of each GPU\n" if len(sizes) == 1 else ""
    return (
        f'local mpsd = dofile("{folder}/mpsd.lua")\n{size}'
        "function slurm_job_submit(job, partitions, uid) return mpsd.submit(job) end\n"
        "function slurm_job_modify(job, record, partitions, uid) return mpsd.modify(job, record) end\n"
        "return slurm.SUCCESS\n"
    )
