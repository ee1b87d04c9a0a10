"""The parts that the programs of this folder have, and the tables that they print for docs/gpu.md."""

import argparse
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

from tests.gpu import machine
from tests.harness import remove_tree

Row = tuple[str, str]
"""A measurement, and its result."""


def parser_of(about: str | None, parts: Iterable[str]) -> argparse.ArgumentParser:
    """Return the parser of a program whose arguments select some of these parts (see `selected`)."""
    names = [*parts]

    def part(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"no part {name}: there are {', '.join(names)}")
        return name

    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", type=part, metavar="PART", help=f"any of {', '.join(names)}")
    return parser


def selected(given: argparse.Namespace, parts: Iterable[str], otherwise: Iterable[str]) -> list[str]:
    """Return the parts that were named, or else these, in the order of all: those that may do damage come last."""
    wanted = {*(given.parts or otherwise)}
    return [each for each in parts if each in wanted]


FAILURES: Final = (AssertionError, KeyError, IndexError, ValueError, OSError, HTTPException, subprocess.SubprocessError)
"""The errors of a part that cannot be measured: a figure, and not the end of the program."""


def measured(part: str, rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows of a part; one that cannot be measured to its end says why.

    Rows after a client that was OUTSIDE MPS say so, too: they are no facts about MPS.
    """
    outside = False
    try:
        for what, answer in rows:
            said_so = machine.OUTSIDE in answer
            yield what, f"after a client {machine.OUTSIDE}: {answer}" if outside and not said_so else answer
            outside |= said_so
    except FAILURES as error:
        yield f"{part}: could not be measured to its end", f"{type(error).__name__}: {error}"


def said(answer: dict[str, Any]) -> str:
    """Put a client's answer into words: `works`, or the error and the failed call."""
    return "works" if answer["ok"] else f"{answer['error']} from {answer['call']}"


def print_table(result: str, rows: Iterable[Row]) -> None:
    """Print rows as they are measured; each says where it is from, if that is not this machine's GPU and driver."""
    print(f"| what | {result} |\n|---|---|", flush=True)
    remark = f" ({machine.origin()})" if machine.origin() else ""
    for what, answer in rows:
        print(f"| {_cell(what)} | {_cell(answer)}{remark} |", flush=True)


def print_measured(result: str, rows: Callable[[Path], Iterator[Row]]) -> int:
    """Print the rows that are measured in a private directory, and return the status of the program."""
    if (missing := machine.missing()) is not None:
        print(f"nothing can be measured: {missing}", file=sys.stderr)
        return 1
    root = machine.private_directory("mg-")
    try:
        control = ("control program", "simulated" if machine.simulated() else f"{machine.control()}")
        print_table(result, itertools.chain([control], rows(root)))
    finally:
        remove_tree(root)
    return 0


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
