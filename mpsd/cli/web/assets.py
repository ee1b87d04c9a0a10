"""The files of the page, read from `page/`, and the headers of every answer."""

from pathlib import Path
from typing import Final, NamedTuple

PAGE: Final = "/"
_FOLDER: Final = Path(__file__).parent / "page"
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_POLICY: Final = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",  # no text can become HTML: the page makes text and elements only
}

HEADERS: Final = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), usb=()",
    "Cache-Control": "no-store",
}


class Asset(NamedTuple):
    """A file of the page."""

    media_type: str
    body: bytes


def assets() -> dict[str, Asset]:
    """Return the files of the page by the path at which each is served."""
    found = {}
    for each in _FOLDER.iterdir():
        media_type = next((kind for end, kind in _MEDIA_TYPES.items() if each.name.endswith(end)), None)
        if media_type is not None:
            path = PAGE if each.name == "index.html" else f"/{each.name}"
            found[path] = Asset(media_type, each.read_bytes())
    return found
