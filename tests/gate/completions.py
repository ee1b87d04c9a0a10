"""The shells' completion files for mpsd and mpsctl.

Each asks the program itself for click's completion, the first time it is needed: the asking and the answering code are
then of one version of click, whichever was installed with mpsd.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

_BASH: Final = """\
# bash completion for {program}, as {program} itself gives it.
eval "$({variable}=bash_source {program} 2>/dev/null)"
"""

_ZSH: Final = """\
#compdef {program}
# zsh completion for {program}, as {program} itself gives it; this once it is called here, and from then on by zsh.
eval "$({variable}=zsh_source {program} 2>/dev/null)"
(( $+functions[{function}] )) && {function} "$@"
"""

_FISH: Final = """\
# fish completion for {program}, as {program} itself gives it.
if command --query {program}
    {variable}=fish_source {program} | source
end
"""


def _made(template: str, program: str) -> str:
    variable = f"_{program.upper()}_COMPLETE"
    return template.format(program=program, variable=variable, function=f"_{program}_completion")


FILES: Final[dict[str, Callable[[], str]]] = {
    name: partial(_made, template, program)
    for program in ("mpsctl", "mpsd")
    for name, template in (
        (f"completions/bash/{program}", _BASH),
        (f"completions/zsh/_{program}", _ZSH),
        (f"completions/fish/{program}.fish", _FISH),
    )
}
"""By the path in the tree."""
