"""What frameworks take of a GPU's memory at once, by the arguments and variables of a process, and what to set."""

from collections.abc import Sequence
from typing import Final

import pytest

from mpsd.core.doctor import frameworks
from mpsd.core.doctor.frameworks import JAX, LIBRARIES, SGLANG, TABLE, VLLM, Demand, Framework

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
    assert [frameworks.demand(each, ("python",), {}) for each in others] == [Demand()] * 2


SETTINGS: Final = {
    (JAX, ""): "XLA_CLIENT_MEM_FRACTION=0.22",
    (JAX, "XLA_CLIENT_MEM_FRACTION"): "XLA_CLIENT_MEM_FRACTION=0.22",
    (JAX, "XLA_PYTHON_CLIENT_MEM_FRACTION"): "XLA_PYTHON_CLIENT_MEM_FRACTION=0.22",
    (JAX, "--xla_gpu_memory_fraction_policy"): "--xla_gpu_memory_fraction_policy=0.22 in XLA_FLAGS",
    (VLLM, ""): "--gpu-memory-utilization 0.22",
    (VLLM, BYTES): "--gpu-memory-utilization 0.22 instead of --kv-cache-memory-bytes",
    (SGLANG, ""): "--mem-fraction-static 0.7",
}


@pytest.mark.parametrize(("asked", "setting"), SETTINGS.items())
def test_what_to_set(asked: tuple[Framework, str], setting: str) -> None:
    """It is one option or variable: JAX refuses its old and its new variable together."""
    assert frameworks.setting(asked[0], 0.25, asked[1]) == setting


def test_what_to_set_under_a_small_lease() -> None:
    assert frameworks.setting(VLLM, 1e-9) == "--gpu-memory-utilization 0.001"
