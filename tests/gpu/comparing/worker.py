"""A client that does timed work: `python -m tests.gpu.comparing.worker ENGINE`, one of `simulated`, `libcuda`, `torch`.

It makes a context, describes it in a line of JSON on stdout, and then answers each line of its stdin with one:

- `prepare WORK`, `drop`: make what a kind of work needs; free all of that
- `run WORK SECONDS`: work for so long without a pause; the answer has the `rate`
- `steps WORK SECONDS`: work for so long with pauses; the answer has the quantiles of a step's time
- `latency COUNT`: launch the shortest kernel and await it, so often; the answer has the quantiles of the time
- `loop SECONDS`: the same, for so long; the answer has the number of `kernels`
- `hold SECONDS`: run one kernel that lasts so long; one answer when it is launched, and one at its end
- `exit`, or the end of its stdin

Quantiles are `p50`, `p99`, `p99.9` and `most`, in milliseconds, with their number `n`. A failure answers `ok` false and
the error. Work is described in tests.gpu.comparing.engine.

It ignores SIGINT, which a terminal sends to all programs: who started it ends it, after its kernel.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from tests.gpu.comparing.engine import Engine, FailedError, Submitted, made
from tests.gpu.comparing.estimates import quantile

PAUSE: Final = 0.004
"""Seconds between two steps of a client that waits for requests."""


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _rate(engine: Engine, work: str, seconds: float) -> dict[str, Any]:
    """Work without a pause: while a step runs, the next one is already submitted."""
    amount, begin = 0.0, time.perf_counter()
    running: Submitted | None = None
    while running is None or time.perf_counter() - begin < seconds:
        following = engine.submit(work)
        if running is not None:
            running.wait()
            amount += running.amount
        running = following
    running.wait()
    return {"rate": (amount + running.amount) / (time.perf_counter() - begin)}


def _timed(what: Callable[[], Submitted]) -> float:
    """Return the milliseconds in which something was submitted and done."""
    begin = time.perf_counter_ns()
    what().wait()
    return (time.perf_counter_ns() - begin) / 1e6


def _quantiles(times: list[float]) -> dict[str, Any]:
    times.sort()
    parts = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "most": 1.0}
    return {"n": len(times), **{name: quantile(times, part) for name, part in parts.items()}}


def _steps(engine: Engine, work: str, seconds: float) -> dict[str, Any]:
    times, end = list[float](), time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        times.append(_timed(lambda: engine.submit(work)))
        time.sleep(PAUSE)
    return _quantiles(times)


def _loop(engine: Engine, seconds: float) -> dict[str, Any]:
    kernels, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        engine.submit("short").wait()
        kernels += 1
    return {"kernels": kernels}


def _do(engine: Engine, line: str) -> dict[str, Any]:
    """Carry out a line, and return the result. Raises FailedError."""
    match line.split():
        case ["prepare", work]:
            engine.prepare(work)
        case ["drop"]:
            engine.drop()
        case ["run", work, seconds]:
            return _rate(engine, work, float(seconds))
        case ["steps", work, seconds]:
            return _steps(engine, work, float(seconds))
        case ["latency", count]:
            engine.prepare("least")
            return _quantiles([_timed(lambda: engine.submit("least")) for _ in range(int(count))])
        case ["loop", seconds]:
            return _loop(engine, float(seconds))
        case ["hold", seconds]:
            engine.hold(float(seconds), lambda: _say({"ok": True}))
        case _:
            raise SystemExit(f"nothing that a worker does: {line!r}")
    return {}


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        engine = made(sys.argv[1])
        _say({"ok": True, "pid": os.getpid(), "by": engine.by, **engine.describe()})
    except FailedError as error:
        _say({"ok": False, "error": str(error)})
        return 1
    for line in sys.stdin:
        if line.strip() == "exit":
            break
        try:
            answer = {"ok": True, **_do(engine, line)}
        except FailedError as error:
            answer = {"ok": False, "error": str(error)}
        _say(answer)
    engine.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
