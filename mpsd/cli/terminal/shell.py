"""An interactive shell for the user, whose prompt shows a label."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_DEFAULT: Final = "/bin/sh"

_BASH: Final = """\
exec {number}<&-
[ -f ~/.bashrc ] && . ~/.bashrc
{exports}
PS1={prompt}"${{PS1:-\\\\$ }}"
"""

_FISH: Final = """\
functions --copy fish_prompt _mpsd_prompt
function fish_prompt; echo -n {prompt}; _mpsd_prompt; end
"""


def interactive(
    label: str, variables: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of the user's shell, and the variables that put this label into its prompt.

    `variables` are exported again after the user's own start-up file. In zsh, whose start-up files set the prompt, the
    label is on the right; in other shells the prompt is replaced.
    """
    program = environment.get("SHELL") or _DEFAULT
    prompt = f"({label}) "
    match Path(program).name:
        case "bash":
            exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())
            number = os.memfd_create("bashrc", 0)  # stays open until bash has read it
            script = _BASH.format(number=number, exports=exports, prompt=shlex.quote(prompt))
            os.write(number, script.encode(errors="surrogateescape"))
            return [program, "--rcfile", f"/dev/fd/{number}", "-i"], {}
        case "fish":
            return [program, "--init-command", _FISH.format(prompt=shlex.quote(prompt)), "-i"], {}
        case "zsh":
            return [program, "-i"], {"RPS1": prompt.strip()}
        case _:
            return [program, "-i"], {"PS1": f"{prompt}$ "}
