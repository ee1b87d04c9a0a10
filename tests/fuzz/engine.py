"""One run of the coverage-guided fuzzer, in a process of its own; `python -m tests.fuzz` is what people call.

`python -m tests.fuzz.engine PROGRAM TARGET ARGUMENT...`: libFuzzer's arguments, and the program by which it starts
itself again when it merges. It ends by itself, with libFuzzer's own status.
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
