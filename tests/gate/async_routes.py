"""The routes of mpsd's API for asyncio, made from those of the client that blocks: mpsd/client/async_routes.py.

Each method is the same but for its `await`; a program of asyncio has no need of a callback while it waits.
"""

import re
import subprocess
import sys
from typing import Final

from tests.gate.source import ROOT

SOURCE: Final = "mpsd/client/client.py"

FILE: Final = "mpsd/client/async_routes.py"

_CHANGES: Final = (
    (r'"""mpsd, with one method for each route."""\n\nimport', '"""%s"""\n\nimport'),
    (r"\bClient\b(?=\()", "AsyncRoutes"),
    (r"\bConnection\b", "AsyncConnection"),
    (r"from mpsd.client.connection import DEADLINE, SOCKET, AsyncConnection, Meanwhile\n",
     "from mpsd.client.async_connection import AsyncConnection\nfrom mpsd.client.connection import DEADLINE, SOCKET\n"),
    (r",\s+meanwhile: Meanwhile \| None = None|, meanwhile=meanwhile", ""),
    (r"\bimport os\n", "import asyncio\nimport os\n"),
    (r"\btime\.sleep\(", "await asyncio.sleep("),
    (r"\bIterator\b", "AsyncIterator"),
    (r"    def (?!variables\b|events\b)", "    async def "),
    (r"self\.(get|text|post|delete)\(", r"await self.\1("),
)  # fmt: skip

_ABOUT: Final = (
    "mpsd, with one method for each route, for asyncio: made from client.py by `python -m tests.gate.generate`."
)


def made() -> str:
    """Return the module, formatted."""
    text = (ROOT / SOURCE).read_text(encoding="utf-8")
    for pattern, instead in _CHANGES:
        text, count = re.subn(pattern, instead, text)
        if not count:
            raise ValueError(f"{SOURCE} has no {pattern}")
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", FILE, "-"]
    text = text.replace('"""%s"""', f'"""{_ABOUT}"""')
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
