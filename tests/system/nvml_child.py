"""Holds one NvmlGpus in its own process, and executes requests of its parent on it; a program for `fake_nvml.Child`.

Each line of its input is (number, request, arguments), each line of its output (number, an error's code or None,
result), pickled and in base64. Requests run concurrently, and are answered when they complete.
"""

import asyncio
import base64
import pickle
import sys

from mpsd.core.errors import MpsdError
from mpsd.system.gpus.gpu import NvmlGpus


async def _do(source: NvmlGpus, name: str, arguments: tuple[object, ...]) -> object:
    match name, arguments:
        case "inventory", ():
            return await source.inventory()
        case "usage", (gpu,):
            return await source.usage(gpu)  # type: ignore[arg-type]
        case "set_compute_mode", (gpu, mode):
            return await source.set_compute_mode(gpu, mode)  # type: ignore[arg-type]
        case "faults", ():
            return await source.faults()
        case "patience", (float(seconds),):
            source.patience = seconds
        case "deadline", (float(seconds),):
            source.deadline = seconds
        case "opening", (float(seconds),):
            source.opening = seconds
        case "close", ():
            source.close()
        case "ping", ():
            pass
        case _:
            raise ValueError(name)
    return None


async def _answer(source: NvmlGpus, line: bytes) -> None:
    number, name, arguments = pickle.loads(base64.b64decode(line))  # noqa: S301 - our own parent wrote it
    answer: tuple[int, str | None, object]
    try:
        answer = number, None, await _do(source, name, arguments)
    except MpsdError as error:
        answer = number, error.code, (error.detail, error.hint)
    sys.stdout.buffer.write(base64.b64encode(pickle.dumps(answer)) + b"\n")
    sys.stdout.buffer.flush()


async def main() -> None:
    """Serve until the input ends, and all requests are answered."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    source = NvmlGpus()
    async with asyncio.TaskGroup() as tasks:
        while line := await lines.readline():
            tasks.create_task(_answer(source, line))


asyncio.run(main())
