"""The readings of a GPU's clock, temperature and power."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.system.fake_nvml import FakeNvml, build

UUID = "GPU-11111111-2222-4333-8444-555555555555"

PROGRAM = """
import json, sys
from tests.gpu.comparing.clocks import of_gpu
with of_gpu(sys.argv[1]) as read:
    for _ in sys.stdin:
        print(json.dumps(read()), flush=True)
"""


def test_readings(tmp_path: Path) -> None:
    """A reading has what NVML reports at that moment, and is None where one of the values is missing."""
    build(tmp_path)
    nvml = FakeNvml(tmp_path, tmp_path)
    gpu = f"gpu {UUID} 9.0 0 85899345920 0 0 Fake GPU"
    nvml.show("driver 580.1", gpu, "clock 0 1980 38 77240")
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, UUID],
        env={**os.environ, **nvml.variables, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    with program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write("\n")
        assert json.loads(program.stdout.readline()) == [1980, 38, 77.24]
        nvml.show("driver 580.1", gpu, "clock 0 345 39 77000", "fault nvmlDeviceGetPowerUsage 0 3")
        program.stdin.write("\n")
        assert json.loads(program.stdout.readline()) is None
        program.stdin.close()
        assert program.wait(10) == 0
