"""`mpsctl usage`: the amounts that were granted."""

import csv
import io
import json
import os

from mpsd.cli.users import name_of
from tests.node import Node

ME = name_of(os.geteuid())


def test_forms(node: Node) -> None:
    """JSON is the API's answer; CSV has a line for each key."""
    node.lease(name="train", labels={"team": "a"})
    answer = json.loads(node.mpsctl("usage", "--by", "name", "-o", "json").stdout)
    assert ("train", 1) in [(each["key"], each["total"]["leases"]) for each in answer["history"]]
    done = node.mpsctl("usage", "--by", "label:team", "--since", "1h", "-o", "csv")
    heading, *rows = csv.reader(io.StringIO(done.stdout))
    assert heading[:2] == ["team", "leases"]
    assert ["a", "1"] in [row[:2] for row in rows]


def test_choices(node: Node) -> None:
    """A GPU, a user and a span of time are chosen with the options of the lists."""
    node.lease(gpu="1")
    assert node.mpsctl("usage", "--by", "gpu", "--gpu", "1").stdout.splitlines()[1].split()[:2] == ["1", "1"]
    assert node.mpsctl("usage", "--user", "4242").stdout == "nothing was granted\n"
    assert node.mpsctl("usage", "--mine", "--no-headers").stdout.split()[0] == ME
    assert node.mpsctl("usage", "--until", "2h").stdout == "nothing was granted\n"


def test_refused(node: Node) -> None:
    """A value that is no key, or no span of time, is refused."""
    assert node.mpsctl("usage", "--by", "nothing").returncode == 2
    done = node.mpsctl("usage", "--since", "1h", "--until", "2h")
    assert done.returncode != 0
    assert "is empty" in done.stderr
