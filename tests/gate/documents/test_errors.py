"""The catalogue of errors is complete, and consistent with the contract."""

import ast
import re
import traceback
from http import HTTPStatus

import pytest

from mpsd.core.errors import MpsdError, catalogue
from tests.gate.source import modules, nodes

EXIT_CODES = {1, 2, 65, 69, 75, 77, 78}
"""The exit codes of mpsd's programs for errors, by the contract."""


@pytest.mark.parametrize("error", catalogue(), ids=lambda error: error.code)
class TestEachError:
    """Rules for every error with a code."""

    def test_has_a_code_for_programs(self, error: type[MpsdError]) -> None:
        """An error's code is lower case with underscores, and derived from its class."""
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", error.code)
        assert error.__name__ == error.code.title().replace("_", "") + "Error"

    def test_keeps_the_contract(self, error: type[MpsdError]) -> None:
        """An error's status is an HTTP error, its exit code is one of the contract's, and the two agree."""
        assert HTTPStatus(error.status) >= HTTPStatus.BAD_REQUEST
        assert error.exit_code in EXIT_CODES
        assert (error.status == HTTPStatus.FORBIDDEN) == (error.exit_code == 77)
        assert error.status != HTTPStatus.UNPROCESSABLE_ENTITY or error.exit_code in {2, 65}
        assert error.exit_code != 75 or error.status in {
            HTTPStatus.CONFLICT,
            HTTPStatus.TOO_MANY_REQUESTS,
            HTTPStatus.SERVICE_UNAVAILABLE,
            HTTPStatus.INSUFFICIENT_STORAGE,
        }

    def test_says_what_to_do(self, error: type[MpsdError]) -> None:
        """An error is raised with a sentence and a hint, has both, and a traceback shows both."""
        raised = error("the thing is broken", hint="mend it", limit="things")
        assert (str(raised), raised.detail, raised.hint, raised.limit) == (
            "the thing is broken",
            "the thing is broken",
            "mend it",
            "things",
        )
        raised.hint += ", or replace it"
        shown = "".join(traceback.format_exception_only(raised))
        assert shown.endswith("Error: the thing is broken\nhint: mend it, or replace it\n")


def test_codes_are_unique() -> None:
    """No two errors have the same code."""
    codes = [error.code for error in catalogue()]
    assert sorted(set(codes)) == sorted(codes)


def test_the_catalogue_is_one_file() -> None:
    """No class of mpsd derives from an error of the catalogue outside it, where no table would show it."""
    names = {error.__name__ for error in MpsdError.__subclasses__()} | {error.__name__ for error in catalogue()}
    elsewhere = [
        f"{module.path}:{node.lineno}: {node.name}"
        for module in modules("mpsd")
        if module.path != "mpsd/core/errors.py"
        for node in nodes(module)
        if isinstance(node, ast.ClassDef)
        if {base.id for base in node.bases if isinstance(base, ast.Name)} & (names | {"MpsdError"})
    ]
    assert not elsewhere, "\n".join(elsewhere)
