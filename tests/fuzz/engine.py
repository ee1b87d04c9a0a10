"""One run of the coverage-guided fuzzer, in a separate process; users call `python -m tests.fuzz`.

`python -m tests.fuzz.engine PROGRAM TARGET ARGUMENT...`: libFuzzer's arguments, and the program by which it restarts
itself when it merges. It exits by itself, with libFuzzer's own status.
"""

import sys

import atheris

with atheris.instrument_imports(include=["mpsd", "tomllib"]):
    from tests.fuzz.targets import TARGETS

if __name__ == "__main__":
    atheris.enabled_hooks.add("RegEx")
    atheris.enabled_hooks.add("str")
    program, target, *arguments = sys.argv[1:]
    atheris.Setup([program, *arguments], TARGETS[target])
    atheris.Fuzz()
