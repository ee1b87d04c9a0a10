"""Pod Security Standards, `restricted`: its rules, as far as a pod specification can break them."""

from collections.abc import Iterator
from typing import Any, Final

_VOLUMES: Final = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip


def forbidden(spec: Any) -> Iterator[str]:
    """Yield the properties of a pod that `restricted` forbids."""
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    yield from (each["name"] for each in spec.get("volumes", ()) if not {*each} - {"name"} <= _VOLUMES)
    own = spec.get("securityContext", {})
    for each in (*spec.get("initContainers", ()), *spec["containers"]):
        context = {**own, **each.get("securityContext", {})}
        capabilities = context.get("capabilities", {})
        broken = {
            "privileged": context.get("privileged", False),
            "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation", True),
            "capabilities.drop": capabilities.get("drop") != ["ALL"],
            "capabilities.add": {*capabilities.get("add", ())} - {"NET_BIND_SERVICE"},
            "runAsNonRoot": not context.get("runAsNonRoot"),
            "runAsUser": context.get("runAsUser") == 0,
            "seccompProfile": context.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"},
            "hostPort": any("hostPort" in port for port in each.get("ports", ())),
        }
        yield from (f"{each['name']}: {name}" for name, is_so in broken.items() if is_so)
