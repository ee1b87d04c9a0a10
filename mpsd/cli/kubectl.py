"""kubectl, by which mpsctl asks the API server: with the caller's own kubeconfig and rights."""

import json
import os
from typing import cast

from mpsd.core.errors import NotFoundError, UnreachableError
from mpsd.system.processes import foreground


class Kubectl:
    def __init__(self, context: str | None) -> None:
        """`context` is one of kubectl's; None for the one that it uses by itself."""
        self._program = ["kubectl", *([] if context is None else [f"--context={context}"])]

    def call(self, *arguments: str) -> str | None:
        """Return kubectl's output; None where it fails: it has said why on stderr. Raises NotFoundError without it."""
        try:
            status, text = foreground.output([*self._program, *arguments], os.environ)
        except FileNotFoundError:
            raise NotFoundError(
                "kubectl is not installed, or not in PATH: mpsctl cluster asks the API server by way of it",
                hint="install kubectl, and see that `kubectl get nodes` works",
            ) from None
        return text if status == 0 else None

    def get(self, *arguments: str) -> list[object] | None:
        """Return the objects that `kubectl get` lists, as `call` does."""
        text = self.call("get", *arguments, "--output=json")
        if text is None:
            return None
        try:
            items = json.loads(text)["items"]
        except (ValueError, KeyError, TypeError):
            raise UnreachableError("kubectl printed something else than a list", hint="see kubectl get nodes") from None
        return cast("list[object]", items) if isinstance(items, list) else []
