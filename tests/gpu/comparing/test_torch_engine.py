"""The work of a program of PyTorch, on the processor, where there is PyTorch."""

import importlib.util

import pytest

from tests.gpu.comparing.engine import FailedError

SMALL = {"matrix": 64, "copied": 1 << 16, "small": 256, "hidden": 64, "layers": 2, "heads": 4, "shared_heads": 2}
SMALL |= {"head": 16, "inner": 128, "vocabulary": 512, "tokens": 32}


@pytest.fixture(autouse=True)
def needs_torch() -> None:
    """Skip a test where there is no PyTorch, which no extra has."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("there is no torch here, with which clients of tests.gpu.compare work where it is")


@pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")
def test_all_work() -> None:
    """Each kind of work is done, in its unit, and again after its memory was freed; another kind is refused."""
    from tests.gpu.comparing.torch_engine import Shape, TorchEngine  # noqa: PLC0415 - it imports torch

    engine = TorchEngine(Shape(**SMALL), "cpu")
    for _ in range(2):
        for work, amount in {"matmul": 4, "copy": 4 / 16384, "short": 500, "decode:3": 3, "least": 1}.items():
            engine.prepare(work)
            step = engine.submit(work)
            step.wait()
            assert step.amount == amount
        engine.drop()
    with pytest.raises(FailedError, match="no work"):
        engine.prepare("nonsense")


@pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")
def test_a_decoder() -> None:
    """A step computes a number for each word and request; the shape has the weights of Qwen3-4B."""
    from tests.gpu.comparing.torch_engine import QWEN3_4B, Decoder, Shape, TorchEngine  # noqa: PLC0415 - it imports torch

    step = Decoder(Shape(**SMALL), TorchEngine(device="cpu").device, 3).step()
    assert step.shape == (3, 512)
    assert step.isfinite().all()
    layer = QWEN3_4B.hidden * (QWEN3_4B.heads + QWEN3_4B.shared_heads) * QWEN3_4B.head * 2 + 3 * 2560 * 9728
    assert QWEN3_4B.layers * layer + QWEN3_4B.hidden * QWEN3_4B.vocabulary == pytest.approx(4.02e9, rel=0.01)
