"""Linters of OpenAPI report neither errors nor warnings about the document."""

import json
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from mpsd.daemon.api.openapi import document
from mpsd.daemon.api.routes import ROUTES
from tests.clients.generated import run

pytestmark = pytest.mark.thorough


def wrong(made: Any) -> list[str]:
    """Return the errors in a document."""
    return [error.message for error in OpenAPIV31SpecValidator(made).iter_errors()]


def test_specification() -> None:
    """The document conforms to OpenAPI 3.1."""
    made = json.loads(json.dumps(document(ROUTES)))
    assert wrong(made) == []
    del made["info"]["title"]
    assert len(wrong(made)) == 1


@pytest.mark.clients
@pytest.mark.timeout(300)
def test_redocly(tmp_path: Path) -> None:
    """Redocly's recommended rules report nothing."""
    (tmp_path / "openapi.json").write_text(json.dumps(document(ROUTES)))
    redocly = ["npx", "--yes", "@redocly/cli@2.77.0", "lint", "--format=json", "openapi.json"]
    assert json.loads(run(*redocly, cwd=tmp_path))["problems"] == []
