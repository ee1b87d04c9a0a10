"""A libcuda.so.1 without a GPU, built from fake_cuda.c."""

import subprocess
from pathlib import Path

from tests.gpu.cuda import LIBRARY
from tests.tools import compiler


def build(directory: Path) -> None:
    """Build the library in this directory."""
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY}"]
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([compiler(), *options, "-o", directory / LIBRARY, source], check=True)
