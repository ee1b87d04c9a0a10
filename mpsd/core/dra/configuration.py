"""The opaque configuration of a claim or a device class: its author's options beside threads and memory. Pure.

The API server accepts any content, so this module is the first to read it. Unknown content is refused: an author who
misspells `strictness` must not get less than requested.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from mpsd.core.dra.objects import Configuration as Given
from mpsd.core.errors import InvalidRequestError
from mpsd.core.model import Stop
from mpsd.core.settings import Attach
from mpsd.core.units import briefly

API_VERSION: Final = "mpsd/v1"
KIND: Final = "Share"

_MOST_PROCESSES: Final = 1000
_MOST_UID: Final = 2**32 - 2
_PRIORITIES: Final = {"normal": 0, "below-normal": 1}
"""The number that MPS has for each."""

_STRICT: Final = (Attach.ANYTIME, Attach.STRICT)
"""In ascending strictness."""


class Configuration(NamedTuple):
    """The options of a share; None where the author set none."""

    strictness: str | None = None
    """The minimum strictness of the node, as a value of `enforcement.attach`."""
    priority: int | None = None
    """The MPS priority of its clients."""
    processes: int | str | None = None
    """The maximum number of its client processes, or `any`."""
    stop: str | None = None
    """How its clients are ended."""
    user: int | None = None
    """The uid of its containers' programs, which gets access to the lease before they start."""


def for_request(given: Iterable[Given], request: str, driver: str) -> Configuration:
    """Return the configuration of a request: for each setting, a later entry overrides an earlier one.

    Raises InvalidRequestError with the name of a wrong setting and its valid values.
    """
    found = dict[str, object]()
    main = request.partition("/")[0]
    for each in given:
        is_for_it = not each.requests or request in each.requests or main in each.requests
        if each.opaque is not None and each.opaque.driver == driver and is_for_it:
            found |= _parsed(each.opaque.parameters)
    return Configuration(**found)  # type: ignore[arg-type]  # each is what its parser returns


def check_strictness(wanted: str, attach: str) -> None:
    """Refuse a share on a node that is less strict than the share requires. Raises InvalidRequestError."""
    if _STRICT.index(Attach(attach)) < _STRICT.index(Attach(wanted)):
        raise InvalidRequestError(
            f"the claim asks for strictness {wanted!r}, and mpsd runs here with enforcement.attach = {attach!r}",
            hint=f"select nodes that have it, by the attribute `attach`, or set attach = {wanted!r} in mpsd.toml",
            limit="strictness",
        )


def _parsed(parameters: object) -> dict[str, object]:
    if not isinstance(parameters, Mapping):
        raise _refused("parameters", parameters, "an object")
    version, kind = parameters.get("apiVersion"), parameters.get("kind")
    if (version, kind) != (API_VERSION, KIND):
        raise InvalidRequestError(
            f"the parameters have apiVersion {briefly(version)} and kind {briefly(kind)}",
            hint=f"write apiVersion: {API_VERSION} and kind: {KIND}",
            limit="apiVersion",
        )
    found = dict[str, object]()
    for name, value in parameters.items():
        if name in {"apiVersion", "kind"}:
            continue
        if name not in _PARSERS:
            near = difflib.get_close_matches(str(name), _PARSERS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_PARSERS)}"
            raise InvalidRequestError(f"there is no parameter {briefly(name)}", hint=hint, limit="parameters")
        found[name] = _PARSERS[name](name, value)
    return found


def _refused(name: str, value: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {briefly(value)} is not {wanted}", hint=f"write {wanted}", limit=name)


def _one_of(choices: Iterable[str]) -> Callable[[str, object], str]:
    allowed = [str(each) for each in choices]

    def parse(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise _refused(name, value, f"one of {', '.join(allowed)}")
        return value

    return parse


def _number(name: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _refused(name, value, f"a whole number from {least} to {most}")
    return value


def _priority(name: str, value: object) -> int:
    return _PRIORITIES[_one_of(_PRIORITIES)(name, value)]


def _processes(name: str, value: object) -> int | str:
    if value == "any":
        return "any"
    if isinstance(value, str):
        raise _refused(name, value, f"a whole number from 1 to {_MOST_PROCESSES}, or any")
    return _number(name, value, 1, _MOST_PROCESSES)


def _user(name: str, value: object) -> int:
    return _number(name, value, 0, _MOST_UID)


_PARSERS: Final[Mapping[str, Callable[[str, object], object]]] = {
    "strictness": _one_of(_STRICT),
    "priority": _priority,
    "processes": _processes,
    "stop": _one_of(Stop),
    "user": _user,
}
