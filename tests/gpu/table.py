"""The tables that the programs of this folder print, for docs/gpu.md."""

from collections.abc import Iterable
from typing import Any

from tests.gpu import machine

Row = tuple[str, str]
"""A measurement, and its result."""


def said(answer: dict[str, Any]) -> str:
    """Put a client's answer into words: `works`, or the error and the failed call."""
    return "works" if answer["ok"] else f"{answer['error']} from {answer['call']}"


def print_table(result: str, rows: Iterable[Row]) -> None:
    """Print rows as they are measured; each says where it is from, if that is not this machine's GPU and driver."""
    print(f"| what | {result} |\n|---|---|", flush=True)
    remark = f" ({machine.origin()})" if machine.origin() else ""
    for what, answer in rows:
        print(f"| {_cell(what)} | {_cell(answer)}{remark} |", flush=True)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
