"""mpsd compared with bare MPS, and with no MPS, on this machine's first GPU: `python -m tests.gpu.compare [PART ...]`.

It prints a table for docs/gpu.md, row by row as it is measured; `--json FILE` keeps every single measurement, and
`--seconds` bounds all of them together. It needs what the tests of a GPU need, and a GPU without other users. With
MPSD_GPU_SIMULATED=1 the GPU is simulated: each row says so, and its figures mean nothing.

Sides are compared in interleaved blocks, ABBA BAAB, and a ratio is the median of the ratios of neighbouring blocks. Its
interval is that of a bootstrap with a fixed seed. `within 1 %` stands only where the whole interval lies there. A part
that fails is a row that says so. SIGINT ends the clients after their work, then the control daemons and mpsd.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from tests.gpu import machine
from tests.gpu.comparing import interrupts
from tests.gpu.comparing.latency import latency, start
from tests.gpu.comparing.lives import churn, ends
from tests.gpu.comparing.rows import HEAD, Row
from tests.gpu.comparing.site import CROWDED, Site, Timer, WrongError, opened
from tests.gpu.comparing.throughput import throughput
from tests.gpu.table import parser_of, selected
from tests.harness import remove_tree
from tests.node import Node


class Part(NamedTuple):
    """A part of the comparison."""

    measure: Callable[[Site, Timer], Iterator[Row]]
    weight: float
    """Its part of the time: of SECONDS, the seconds."""
    config: str
    """The configuration of mpsd."""


PARTS: Final = {
    "throughput": Part(throughput, 200, CROWDED),
    "latency": Part(latency, 70, CROWDED),
    "start": Part(start, 30, CROWDED),
    "churn": Part(churn, 120, ""),
    "ends": Part(ends, 120, ""),
}
"""By name; the one that ends clients in mid-kernel is the last."""

SECONDS: Final = 540.0

LEAST: Final = 0.5
"""Seconds that a part needs at least."""

GRACE: Final = 60.0
"""Seconds after its time after which a part is ended."""


def compared(root: Path, parts: Mapping[str, Part], timer: Timer, grace: float = GRACE) -> Generator[Row]:
    """Carry out these parts within the time, each with its own mpsd, and yield their rows."""
    (root / "head").mkdir()
    with machine.running(root / "head") as node:
        yield from _head(node)
    weights = [part.weight for part in parts.values()]
    for done, (name, part) in enumerate(parts.items()):
        own = timer.part(part.weight, sum(weights[done:]))
        if own.left < LEAST:
            yield Row(name, f"left out: {max(own.left, 0):.1f} s of the time are left", failed=True)
            continue
        begin = time.monotonic()
        try:
            with opened(root / name, part.config) as site, interrupts.within(max(own.left, 0) + grace):
                yield from part.measure(site, own)
        except Exception as error:  # noqa: BLE001 - the other parts are measured all the same
            what = str(error) if isinstance(error, WrongError) else f"{type(error).__name__}: {error}"
            yield Row(f"{name}, after {time.monotonic() - begin:.0f} s", what, failed=True)


def _head(node: Node) -> Iterator[Row]:
    """Yield what the figures are measured on."""
    gpu = machine.first_gpu(node)
    yield Row("GPU", f"{gpu['name']}, {gpu['memory_total'] >> 20} MiB")
    lines = node.control_log("gpu0").read_text(encoding="utf-8", errors="replace").splitlines()
    version = next((line.rpartition(":")[2].strip() for line in lines if "binary version" in line), "not told")
    yield Row("driver, control daemon", f"{node.daemons()['gpu0']['version']}, binary version {version}")


def main() -> int:
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together (%(default)g)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement to this file")
    given = parser.parse_args()
    if (missing := machine.missing()) is not None:
        print(f"nothing to compare: {missing}", file=sys.stderr)
        return 1
    parts = {name: PARTS[name] for name in selected(given, PARTS, PARTS)}
    interrupts.install()
    rows: list[Row] = []
    root = machine.private_directory("mc-")
    status = 0
    try:
        print(HEAD, flush=True)
        with contextlib.closing(compared(root, parts, Timer(given.seconds))) as found:
            for row in found:
                remark = f" ({machine.origin()})" if machine.origin() else ""
                rows.append(replace(row, result=f"{row.result}{remark}"))
                print(rows[-1], flush=True)
        status = int(any(row.failed for row in rows))
    except KeyboardInterrupt:
        status = 130
    finally:
        remove_tree(root)
        if given.json is not None:
            given.json.write_text(json.dumps({"rows": [row.as_json() for row in rows]}, indent=1), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
