"""Helm as a program, by its library for Python: descriptors that the library leaves open close with the process.

`python -m tests.cluster.helm_program render|lint CHART` reads values from stdin, and prints Helm's result.
"""

import json
import sys
from typing import Any

import helm_python


def main() -> None:
    """Print `rendered`, files by their names; `lint`, its messages; or `refused`, the reason against the values."""
    what, chart = sys.argv[1:]
    values = json.load(sys.stdin)
    answer: dict[str, Any]
    if what == "lint":
        answer = {"lint": helm_python.lint(chart, values, strict=True)}
    else:
        try:
            answer = {"rendered": helm_python.Chart.load(chart).render(values, name="mpsd", namespace="mpsd")}
        except (helm_python.HelmValuesError, helm_python.HelmRenderError) as error:
            answer = {"refused": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
