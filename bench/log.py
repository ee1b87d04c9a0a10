"""The time until a foreign command in a control daemon's log is answered."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bench.service import bare_environment, running
from bench.side_by_side import Figure


def drift(control: str, root: Path) -> Iterator[Figure]:
    """Measure the time from the end of the front-end that set a foreign limit until mpsd has undone that."""
    environment = bare_environment(root / "bare")
    with running(control, root / "mpsd", 1) as service:
        environment["CUDA_MPS_PIPE_DIRECTORY"] = str(service.root / "run" / "mps" / "gpu0")
        waits = []
        for _ in range(9):
            time.sleep(1.1)  # out of step with mpsd's periodic work
            _say(control, environment, "set_default_active_thread_percentage 10\n")
            before = time.perf_counter()
            service.next_event("limit_drift_ended")
            waits.append(time.perf_counter() - before)
    yield Figure("a stranger's limit is put back, at the latest after", 1000 * max(waits), 2000, "ms")


def _say(control: str, environment: dict[str, str], script: str) -> None:
    """Send a command in one front-end, again if mpsd's own front-end was being served."""
    for _ in range(100):
        said = subprocess.run([control], input=script, env=environment, capture_output=True, text=True, check=False)
        if not said.stdout.startswith("Cannot"):
            return
    raise AssertionError("the control daemon was never free")
