"""The work of a program of PyTorch: a matrix product, a copy, short kernels, and a decoder of Qwen3-4B's shape.

The weights are random, so nothing is downloaded; the times of these kernels do not depend on the values. On a machine
without a GPU all of it runs on the processor where the shapes are small: that is how it is tested.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from tests.gpu.comparing.engine import FailedError, Submitted
from tests.gpu.cuda import Cuda

REPEATS: Final = 4
"""Matrix products, or copies, of a step: some milliseconds of work, so that submitting them costs nothing."""

SHORT: Final = 500
"""Short kernels of a step: about 2 us each on a whole data centre GPU, one after the other."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of all work."""

    matrix: int = 8192
    copied: int = 2 << 30
    """Bytes."""
    small: int = 1 << 16
    """Numbers that a short kernel adds to."""
    hidden: int = 2560
    layers: int = 36
    heads: int = 32
    shared_heads: int = 8
    """Heads of the keys and values."""
    head: int = 128
    inner: int = 9728
    vocabulary: int = 151936
    tokens: int = 2176
    """Tokens of each request that the keys and values are kept of: 2048 of its text, and half of 256 of the answer."""


QWEN3_4B: Final = Shape()
"""The decoder is that of Qwen3-4B (its config.json): 4.0 billion weights, 8 GB in bfloat16."""


class Decoder:
    """The step of a decoder that gives each of its requests one more token, as a CUDA graph where there is a GPU.

    It reads and multiplies all that such a step does. Rotations and the normalisation of queries, which cost next to
    nothing, are left out, and the position of a token stays the same.
    """

    def __init__(self, shape: Shape, device: Any, requests: int) -> None:
        self._shape, self._device, self._requests = shape, device, requests
        heads = (shape.heads + 2 * shape.shared_heads) * shape.head
        self._layers = [
            (
                self._random(shape.hidden, heads),
                self._random(shape.heads * shape.head, shape.hidden),
                self._random(shape.hidden, 2 * shape.inner),
                self._random(shape.inner, shape.hidden),
                self._random(requests, shape.shared_heads, shape.tokens, shape.head),
                self._random(requests, shape.shared_heads, shape.tokens, shape.head),
            )
            for _ in range(shape.layers)
        ]
        self._output = self._random(shape.hidden, shape.vocabulary)
        self._input = self._random(requests, shape.hidden)
        self.step: Callable[[], Any] = self._forward
        if device.type == "cuda":
            self.step = self._captured()

    def _random(self, *sizes: int) -> Any:
        return torch.randn(*sizes, device=self._device, dtype=torch.bfloat16).mul_(0.02)

    def _captured(self) -> Callable[[], object]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):  # what is made at the first use is not captured
                self._forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._forward()
        replay: Callable[[], object] = graph.replay
        return replay

    def _forward(self) -> Any:
        shape, functional, now = self._shape, torch.nn.functional, self._input
        for projected, out, widened, narrowed, keys, values in self._layers:
            normal = functional.rms_norm(now, (shape.hidden,))
            queries = (normal @ projected)[:, : shape.heads * shape.head].view(
                self._requests, shape.heads, 1, shape.head
            )
            seen = functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
            now = now + seen.reshape(self._requests, shape.heads * shape.head) @ out
            gate, up = (functional.rms_norm(now, (shape.hidden,)) @ widened).chunk(2, -1)
            now = now + (functional.silu(gate) * up) @ narrowed
        return now @ self._output


class TorchEngine:
    """The engine of programs of PyTorch, on the first visible GPU."""

    def __init__(self, shape: Shape = QWEN3_4B, device: str = "cuda") -> None:
        """Make the context. Raises FailedError."""
        self.by = f"torch {torch.__version__}"
        self._shape, self.device = shape, torch.device(device)
        self._work: dict[str, Callable[[], float]] = {}
        torch.set_grad_enabled(False)
        self._do(lambda: torch.zeros(1, device=self.device))

    def _do(self, what: Callable[[], Any]) -> Any:
        try:
            return what()
        except RuntimeError as error:  # torch's own errors of CUDA, of memory among them, are kinds of it
            raise FailedError(str(error).partition("\n")[0]) from error

    def describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        multiprocessors = properties.multi_processor_count
        return {"mps": Cuda().inside, "multiprocessors": multiprocessors, "free": free, "total": total}

    def prepare(self, work: str) -> None:
        """Make what this work needs, and do it twice."""
        if work not in self._work:
            self._work[work] = self._do(lambda: self._made(work))
        for _ in range(2):
            self.submit(work).wait()

    def _made(self, work: str) -> Callable[[], float]:
        shape, device = self._shape, self.device
        kind, _, requests = work.partition(":")
        match kind:
            case "matmul":
                one, other, product = (
                    torch.randn(shape.matrix, shape.matrix, device=device, dtype=torch.bfloat16) for _ in range(3)
                )
                return _repeated(lambda: torch.matmul(one, other, out=product), REPEATS, REPEATS)
            case "copy":
                source, target = (torch.zeros(shape.copied, device=device, dtype=torch.uint8) for _ in range(2))
                return _repeated(lambda: target.copy_(source), REPEATS, REPEATS * shape.copied / (1 << 30))
            case "short":
                numbers = torch.zeros(shape.small, device=device)
                return _repeated(lambda: numbers.add_(1.0), SHORT, SHORT)
            case "least":
                number = torch.zeros(1, device=device)
                return _repeated(lambda: number.add_(1.0), 1, 1)
            case "decode":
                decoder = Decoder(shape, device, int(requests))
                # Not `decoder.step`: a graph alone does not keep the memory that it reads.
                return _repeated(lambda: decoder.step(), 1, int(requests))  # noqa: PLW0108 - see above
            case _:
                raise FailedError(f"no work {work!r}")

    def drop(self) -> None:
        """Free what was made for all work."""
        self._work.clear()
        gc.collect()
        if self.device.type == "cuda":
            self._do(torch.cuda.synchronize)
            torch.cuda.empty_cache()

    def submit(self, work: str) -> Submitted:
        amount = self._do(self._work[work])
        if self.device.type != "cuda":
            return Submitted(amount, lambda: None)
        event = torch.cuda.Event()
        event.record()
        return Submitted(amount, lambda: self._do(event.synchronize))

    def hold(self, seconds: float, launched: Callable[[], None]) -> None:
        """Refuse: long kernels are run without torch."""
        raise FailedError(f"no kernel of {seconds:g} s with torch, for {launched}")

    def leave(self) -> None:
        """Do nothing: the driver notices the end of the process."""


def _repeated(what: Callable[[], object], times: int, amount: float) -> Callable[[], float]:
    def step() -> float:
        for _ in range(times):
            what()
        return amount

    return step
