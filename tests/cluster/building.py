"""Kubernetes, built from Debian's source package, with its dependencies, unpacked from Debian's packages."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests import cluster
from tests.real.apt import FetchError, architecture, configuration, mirrors, run

_SUITE: Final = "bookworm"
"""The last suite whose source package is the whole of Kubernetes: later ones have kubectl alone."""

_PACKAGES: Final = ("containerd", "containernetworking-plugins", "etcd-server", "kubernetes-client", "runc")
_NEWER: Final = ("kubectl",)
_GO: Final = ("golang-1.19-go", "golang-1.19-src")
_GO_ROOT: Final = "usr/lib/go-1.19"

_REFLECT: Final = "github.com/modern-go/reflect2"
_NEWER_REFLECT: Final = ("golang-github-modern-go-reflect2-dev",)
"""Kubernetes has 1.0.1, which Go 1.18 and newer break: the API server would die of each patch of a webhook."""

_TAGS: Final = "providerless,dockerless"
"""Kubernetes' own tags, which leave out the clouds, whose metadata is unavailable here, and Docker."""

_SECONDS: Final = 3000.0
"""Deadline of the build, beside tests on two processors."""

_NAME: Final = "k8s.io/kubernetes"
_OPENAPI: Final = "pkg/generated/openapi"


def kubernetes(say: Callable[[str], object] = lambda _: None) -> Path:
    """Return the directory with all programs; make it first if it is missing.

    Raises FetchError when something for it cannot be fetched or built. Concurrent calls do not disturb each other.
    """
    cache = cluster.cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    place = cache / f"{cluster.VERSION}-{cluster.recipe()}"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in cache.glob(".building-*"):  # left by a build that was killed
            shutil.rmtree(left)
        if not place.exists():
            folder = Path(tempfile.mkdtemp(prefix=".building-", dir=cache))
            try:
                _make(folder, say)
                (folder / "made").rename(place)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return place


def _make(folder: Path, say: Callable[[str], object]) -> None:
    begin = time.monotonic()

    def done(what: str) -> None:
        say(f"{time.monotonic() - begin:6.1f} s  {what}")

    made, go, tree = folder / "made", folder / "go", folder / "path" / "src" / _NAME
    config = _apt(folder / "apt", _SUITE, types="deb deb-src")
    for packages, root in ((_PACKAGES, made), (_GO, go)):
        _unpack(packages, root, folder / "packages", config)
    _unpack(_NEWER, made / cluster.NEWER, folder / "packages", _apt(folder / "newer", cluster.NEWER))
    run("apt-get", "-qq", "source", "--download-only", "kubernetes", config=config, cwd=folder)
    (description,) = folder.glob("kubernetes_*.dsc")
    tree.parent.mkdir(parents=True)
    # apt has verified it by its index; --no-check avoids the need for its uploaders' keys.
    run("dpkg-source", "--no-check", "--extract", str(description), str(tree))
    _unpack(_NEWER_REFLECT, folder / "reflect", folder / "packages", config)
    shutil.rmtree(tree / "vendor" / _REFLECT)
    shutil.move(folder / "reflect" / "usr" / "share" / "gocode" / "src" / _REFLECT, tree / "vendor" / _REFLECT)
    (made / "bin").mkdir(parents=True)
    pause = tree / "build" / "pause" / "linux" / "pause.c"
    run("gcc", "-Os", "-static", "-DVERSION=1", "-o", f"{made}/bin/pause", str(pause))
    absent = [each for each in cluster.UNPACKED if not (made / each).exists()]
    if absent:
        raise FetchError(f"Debian's packages have no {', '.join(absent)}")
    done("everything is here")
    compiler = _Go(go / _GO_ROOT, folder, tree)
    if not (tree / _OPENAPI / "zz_generated.openapi.go").exists():
        _write_openapi(compiler, folder / "openapi")
        done("what the API server says of its types is written")
    package = f"{_NAME}/vendor/k8s.io/component-base/version"
    major, minor, _ = cluster.VERSION.split(".")
    known = {"gitVersion": f"v{cluster.VERSION}", "gitMajor": major, "gitMinor": minor}
    stamps = " ".join(f"-X {package}.{name}={value}" for name, value in known.items())
    programs = [f"{_NAME}/cmd/{each}" for each in cluster.BUILT]
    compiler("build", "-trimpath", "-tags", _TAGS, "-ldflags", f"-s -w {stamps}", "-o", f"{made}/bin/", *programs)
    done("everything is built")


def _apt(folder: Path, suite: str, types: str = "deb") -> Path:
    folder.mkdir()
    config = configuration(folder, mirrors()[0], suite, "main", architecture(), types=types)
    run("apt-get", "-qq", "update", config=config)
    return config


def _unpack(packages: tuple[str, ...], root: Path, folder: Path, config: Path) -> None:
    folder.mkdir()
    run("apt-get", "-qq", "download", *packages, config=config, cwd=folder)
    for package in folder.iterdir():
        run("dpkg-deb", "--extract", str(package), str(root))
    shutil.rmtree(folder)
    shutil.rmtree(root / "usr" / "share" / "doc", ignore_errors=True)


class _Go:
    """Debian's Go, in the mode without modules: it refuses this tree's go.mod."""

    def __init__(self, root: Path, folder: Path, tree: Path) -> None:
        self.tree = tree
        self._program = root / "bin" / "go"
        self._settings = {
            "GOROOT": root, "GOPATH": folder / "path", "GOCACHE": folder / "cache", "GOTMPDIR": folder, "HOME": folder,
            "GO111MODULE": "off", "GOPROXY": "off", "GOFLAGS": "", "CGO_ENABLED": "0", "PWD": tree,
        }  # fmt: skip

    def __call__(self, *arguments: str) -> str:
        """Run it in the tree."""
        settings = (f"{name}={value}" for name, value in self._settings.items())
        return run("env", *settings, str(self._program), *arguments, cwd=self.tree, seconds=_SECONDS)


def _write_openapi(go: _Go, folder: Path) -> None:
    """Write the API server's description of its types: the only generated file that the source package lacks."""
    marked: set[str] = set()
    for root, name in (("staging/src", ""), ("pkg", f"{_NAME}/pkg")):
        for path in (go.tree / root).rglob("*.go"):
            parent = path.relative_to(go.tree / root).parent
            if any("example" in part or "sample" in part for part in parent.parts):
                continue
            if b"+k8s:openapi-gen=true" in path.read_bytes():
                marked.add(os.path.join(name, parent))  # noqa: PTH118 - the name of a package
    go(
        "run", f"{_NAME}/vendor/k8s.io/kube-openapi/cmd/openapi-gen",
        "-O", "zz_generated.openapi", "-p", f"{_NAME}/{_OPENAPI}", "-o", str(folder),
        "-h", "hack/boilerplate/boilerplate.generatego.txt", "-r", str(folder / "violations"),
        "-i", ",".join(sorted(marked)),
    )  # fmt: skip
    shutil.copy(folder / _NAME / _OPENAPI / "zz_generated.openapi.go", go.tree / _OPENAPI)
