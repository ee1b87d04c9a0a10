"""What frameworks take of a GPU's memory at once, by the arguments and variables of a process, and what to set."""

from collections.abc import Sequence
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.errors import InvalidRequestError
from mpsd.core.programs import frameworks
from mpsd.core.programs.frameworks import JAX, LIBRARIES, NAMES, SGLANG, TABLE, VLLM, Applied, Demand, Framework
from mpsd.core.units import GIB, MIB

COMMANDS: Final[tuple[tuple[Sequence[str], Framework | None], ...]] = (
    (("vllm", "serve"), VLLM),
    (("/usr/bin/python3", "/usr/local/bin/vllm", "serve"), VLLM),
    (("python", "-m", "vllm.entrypoints.openai.api_server"), VLLM),
    (("python3.12", "-X", "faulthandler", "-u", "-mvllm", "serve"), VLLM),
    (("VLLM::EngineCore_DP0", "", ""), VLLM),
    (("VLLM::Worker_TP0",), VLLM),
    (("sglang", "serve"), SGLANG),
    (("python", "-m", "sglang.launch_server"), SGLANG),
    (("sglang::scheduler_TP0", ""), SGLANG),
    (("sglang::detokenizer",), SGLANG),
    (("tail", "-f", "vllm.log"), None),
    (("python", "vllm.py"), None),
    (("python", "train.py", "vllm"), None),
    (("/opt/vllm/bin/python", "train.py"), None),
    (("python", "-c", "import vllm"), None),
    (("gunicorn: VLLM::x",), None),
    (("python",), None),
    ((), None),
)


@pytest.mark.parametrize(("arguments", "framework"), COMMANDS)
def test_which_one(arguments: Sequence[str], framework: Framework | None) -> None:
    """A program, a module or a title shows a framework; a word elsewhere does not."""
    assert frameworks.of(arguments, []) == framework


def test_by_its_library() -> None:
    """A library shows a framework too, and a command shows it better."""
    assert [getattr(frameworks.of(("python", "a.py"), [each]), "library", "") for each in LIBRARIES] == [*LIBRARIES]
    assert frameworks.of(("vllm", "serve"), LIBRARIES) == VLLM


OPTION: Final = "--gpu-memory-utilization"
BYTES: Final = "--kv-cache-memory-bytes"

OF_VLLM: Final = {
    "": Demand(0.9),
    "--gpu-memory-utilization 0.5": Demand(0.5, given=OPTION),
    "--gpu-memory-utilization=.5 --port 1": Demand(0.5, given=OPTION),
    "--gpu_memory_utilization 0.5": Demand(0.5, given=OPTION),
    "--gpu-mem 0.5": Demand(0.5, given=OPTION),
    "--gpu-memory-utilization 0.1 --gpu-memory-utilization 0.9": Demand(0.9, given=OPTION),
    "--gpu-memory-utilization 0.9 --kv-cache-memory-bytes 2G": Demand(size=2 << 30, given=BYTES),
    "--kv-cache-memory-bytes 5000000": Demand(size=5_000_000, given=BYTES),
    "--kv_cache_memory_bytes=1.5k": Demand(size=1500, given=BYTES),
    "--config a.yaml --gpu-memory-utilization 0.5": Demand(0.5, given=OPTION),
}

UNKNOWN_OF_VLLM: Final = ("--gpu-memory-utilization", "--gpu-memory-utilization=x", f"{BYTES} many", "--config a.yaml")

OF_JAX: Final[tuple[tuple[dict[str, str], Demand], ...]] = (
    ({}, Demand(0.75)),
    ({"XLA_CLIENT_MEM_FRACTION": ".2"}, Demand(0.2, given="XLA_CLIENT_MEM_FRACTION")),
    ({"XLA_CLIENT_MEM_FRACTION": "0.3-0.8"}, Demand(0.3, given="XLA_CLIENT_MEM_FRACTION")),
    ({"XLA_CLIENT_MEM_FRACTION": ""}, Demand(0.75)),
    ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}, Demand(0.9, given="XLA_PYTHON_CLIENT_MEM_FRACTION")),
    (
        {"XLA_FLAGS": "--xla_a=b --xla_gpu_memory_fraction_policy=0.4", "XLA_CLIENT_MEM_FRACTION": ".2"},
        Demand(0.4, given="--xla_gpu_memory_fraction_policy"),
    ),
    ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, Demand()),
    ({"XLA_PYTHON_CLIENT_PREALLOCATE": "0", "XLA_CLIENT_MEM_FRACTION": ".9"}, Demand()),
    ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, Demand(0.75)),
    ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, Demand()),
    ({"XLA_PYTHON_CLIENT_ALLOCATOR": "vmm"}, Demand()),
    ({"XLA_PYTHON_CLIENT_ALLOCATOR": "BFC"}, Demand(0.75)),
    ({"TF_FORCE_UNIFIED_MEMORY": "1", "XLA_CLIENT_MEM_FRACTION": "4.0"}, Demand()),
    ({"JAX_PLATFORMS": "cpu"}, Demand()),
    ({"JAX_PLATFORMS": "cuda,cpu"}, Demand(0.75)),
)


@pytest.mark.parametrize(("options", "demand"), OF_VLLM.items())
def test_what_vllm_takes(options: str, demand: Demand) -> None:
    """The last value that was given counts, in any notation of its parser."""
    assert frameworks.demand(VLLM, ("vllm", "serve", "m", *options.split()), {}) == demand


@pytest.mark.parametrize("options", UNKNOWN_OF_VLLM)
def test_what_is_unknown_of_vllm(options: str) -> None:
    assert frameworks.demand(VLLM, ("vllm", "serve", "m", *options.split()), {}).unknown


@pytest.mark.parametrize(("variables", "demand"), OF_JAX)
def test_what_jax_takes(variables: dict[str, str], demand: Demand) -> None:
    """The value counts, not that a variable is set; some settings take nothing at once."""
    assert frameworks.demand(JAX, (), variables) == demand


def test_what_sglang_takes() -> None:
    """A given part is one of what is free, which is the lease's; the default comes from the total."""
    assert frameworks.demand(SGLANG, ("sglang", "serve"), {}).part == SGLANG.part
    assert frameworks.demand(SGLANG, ("sglang", "serve", "--mem-fraction-static=0.9"), {}).part == 0.0
    assert frameworks.demand(SGLANG, ("sglang::scheduler",), {}).unknown


def test_who_sizes_by_what_is_free() -> None:
    """The others take nothing of the total."""
    others = [each for each in TABLE if each not in {JAX, VLLM, SGLANG}]
    assert [frameworks.demand(each, ("python",), {}) for each in others] == [Demand()] * 3


SETTINGS: Final = {
    (JAX, ""): "XLA_CLIENT_MEM_FRACTION=0.22",
    (JAX, "XLA_CLIENT_MEM_FRACTION"): "XLA_CLIENT_MEM_FRACTION=0.22",
    (JAX, "XLA_PYTHON_CLIENT_MEM_FRACTION"): "XLA_PYTHON_CLIENT_MEM_FRACTION=0.22",
    (JAX, "--xla_gpu_memory_fraction_policy"): "--xla_gpu_memory_fraction_policy=0.22 in XLA_FLAGS",
    (VLLM, ""): "--gpu-memory-utilization 0.22",
    (VLLM, BYTES): "--gpu-memory-utilization 0.22 instead of --kv-cache-memory-bytes",
    (SGLANG, ""): "--mem-fraction-static 0.7",
}


WHOLE: Final = 80 * GIB
QUARTER: Final = 20 * GIB


@pytest.mark.parametrize(("asked", "setting"), SETTINGS.items())
def test_what_to_set(asked: tuple[Framework, str], setting: str) -> None:
    """It is one option or variable: JAX refuses its old and its new variable together."""
    assert frameworks.setting(asked[0], QUARTER, WHOLE, asked[1]) == setting


def test_what_to_set_under_a_small_lease() -> None:
    assert frameworks.setting(VLLM, 1, WHOLE) == "--gpu-memory-utilization 0.001"


# -- advice ------------------------------------------------------------------------------------------------------------

ADVICE: Final = {
    "vllm": (0.22, ("--gpu-memory-utilization", "0.22"), None),
    "sglang": (0.7, ("--mem-fraction-static", "0.7"), None),
    "jax": (0.22, None, ("XLA_CLIENT_MEM_FRACTION", "0.22")),
    "pytorch": (0.22, None, ("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:0.22")),
    "tensorflow": (0.22, None, ("TF_FORCE_GPU_ALLOW_GROWTH", "true")),
    "triton": (0.97, ("--model-load-gpu-limit", "0:0.97"), None),
}


@pytest.mark.parametrize("name", NAMES)
def test_advice(name: str) -> None:
    """For a quarter of a GPU; each row says where it was read."""
    found = frameworks.advice(name, QUARTER, WHOLE)
    assert (found.fraction, found.option, found.variable) == ADVICE[name]
    assert found.framework.lower() == name
    assert all((found.note, found.source, found.version))
    assert frameworks.advice(name.upper(), QUARTER, WHOLE) == found


@given(memory=st.integers(1, 200 * GIB), total=st.integers(4 * GIB, 200 * GIB))
def test_advice_fits(memory: int, total: int) -> None:
    """A part of the total is less than the lease has; Triton's limit lets a first model in, and not a full lease."""
    part = min(memory, total) / total
    for name in ("vllm", "jax", "pytorch", "tensorflow"):
        assert 0 < frameworks.advice(name, memory, total).fraction < max(part, 0.0011)
    assert 0.5 <= frameworks.advice("sglang", memory, total).fraction <= 0.9
    limit = frameworks.advice("triton", memory, total).fraction
    assert limit <= 1 - 0.11 * part or part < 0.01
    if part >= 0.01:  # of less, four digits say nothing
        assert limit > 1 - part


@pytest.mark.parametrize(
    ("name", "hint"), [("vlm", "did you mean vllm?"), ("torch", "did you mean pytorch?"), ("x", "There is some for")]
)
def test_unknown_framework(name: str, hint: str) -> None:
    """The refusal names the nearest name, or all."""
    with pytest.raises(InvalidRequestError) as refused:
        frameworks.advice(name, QUARTER, WHOLE)
    assert hint in refused.value.hint
    assert "triton" in refused.value.hint


@pytest.mark.parametrize("sizes", [(0, WHOLE), (QUARTER, 0)])
def test_no_advice_without_sizes(sizes: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequestError, match="there is no advice"):
        frameworks.advice("vllm", *sizes)


# -- mpsctl run --for --------------------------------------------------------------------------------------------------

VARIABLE: Final = "XLA_CLIENT_MEM_FRACTION"

APPLIED: Final[dict[str, tuple[str, str, dict[str, str], dict[str, str], str]]] = {
    "an option is told": ("vllm", "vllm serve m", {}, {}, "add --gpu-memory-utilization 0.22 to the command"),
    "where a shell starts it": ("vllm", "sh -c x", {}, {}, "add --gpu-memory-utilization 0.22"),
    "its file may have it": ("vllm", "vllm serve --config a", {}, {}, "add --gpu-memory-utilization 0.22"),
    "it is there": ("vllm", "vllm serve m --gpu-memory-utilization 0.2", {}, {}, ""),
    "it is too large": (
        "vllm", "vllm serve m --gpu-memory-utilization=.9", {}, {},
        "takes 72GiB, of the 20GiB that each process has: use --gpu-memory-utilization 0.22 (vLLM 0.33.0, not",
    ),
    "nothing is left for the context": (
        "vllm", "vllm serve m --gpu-memory-utilization=.25", {}, {}, "takes 20GiB, of the 20GiB"
    ),
    "bytes are too many": ("vllm", f"vllm serve {BYTES} 30G", {}, {}, f"0.22 instead of {BYTES}"),
    "a part of what is free": ("sglang", "sglang serve --mem-fraction-static 0.9", {}, {}, ""),
    "a part of what is free is told": ("sglang", "sglang serve", {}, {}, "add --mem-fraction-static 0.7"),
    "a variable is set": ("jax", "python a.py", {}, {VARIABLE: "0.22"}, f"{VARIABLE}=0.22 is set (JAX 0.11.1"),
    "an empty one too": ("jax", "python a.py", {VARIABLE: ""}, {VARIABLE: "0.22"}, "is set"),
    "the user's stays": ("jax", "python a.py", {VARIABLE: ".1"}, {}, ""),
    "the user's is too large": ("jax", "python a.py", {VARIABLE: ".9"}, {}, f"{VARIABLE} takes 72GiB"),
    "the old name": ("jax", "a", {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".1"}, {}, ""),
    "the old name, unused": (
        "jax", "a", {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, {}, ""
    ),
    "the policy": ("jax", "a", {"XLA_FLAGS": "--xla_gpu_memory_fraction_policy=0.2"}, {}, ""),
    "growth": ("tensorflow", "a", {}, {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}, "is set"),
    "no growth": ("tensorflow", "a", {"TF_FORCE_GPU_ALLOW_GROWTH": "false"}, {}, ""),
    "no setting": ("pytorch", "a", {}, {}, "PyTorch needs no setting (PyTorch 2.13.0"),
    "a limit of its own": ("triton", "a", {}, {}, "needs no setting; where you want a limit of its own"),
}  # fmt: skip


@pytest.mark.parametrize("case", APPLIED)
def test_applied(case: str) -> None:
    """Variables are set where the user has set none; options are told, unless they are there and fit."""
    name, command, variables, applied, text = APPLIED[case]
    found = frameworks.applied(name, QUARTER, WHOLE, command.split(), variables)
    assert found.variables == applied
    assert text in found.note
    assert bool(text) == bool(found.note)


def test_applied_beside_a_context() -> None:
    """An option that leaves room for a context is right."""
    part = f"{(QUARTER - 23 * MIB) / WHOLE:.6f}"[:-1]
    command = ("vllm", "serve", "--gpu-memory-utilization", part)
    assert frameworks.applied("vllm", QUARTER, WHOLE, command, {}) == Applied({}, "")
