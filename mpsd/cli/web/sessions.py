"""Links and sessions: a link opens the page in one browser, which gets a session for it."""

import secrets
import threading
from collections import deque
from hmac import compare_digest
from typing import Final

from mpsd.core.errors import NotPermittedError

_MOST: Final = 8
"""Unused links, used links, and sessions at most, each; one more makes the oldest void."""

_BYTES: Final = 32


class Sessions:
    """Links and sessions, each a random text of 256 bits. It is safe to use from several threads."""

    def __init__(self) -> None:
        """Begin without links and sessions."""
        self._lock = threading.Lock()
        self._links: deque[str] = deque(maxlen=_MOST)
        self._used: deque[str] = deque(maxlen=_MOST)
        self._sessions: deque[str] = deque(maxlen=_MOST)

    def link(self) -> str:
        """Return a token that opens one session."""
        token = secrets.token_urlsafe(_BYTES)
        with self._lock:
            self._links.append(token)
        return token

    def open(self, token: str) -> str:
        """Return a new session for a link, and make the link void. Raises NotPermittedError for any other token."""
        with self._lock:
            if _is_among(token, self._links):
                self._links.remove(token)
                self._used.append(token)
                self._sessions.append(secrets.token_urlsafe(_BYTES))
                return self._sessions[-1]
            if _is_among(token, self._used):
                raise NotPermittedError("this link was used before, and a link opens the page once", hint=ANOTHER_LINK)
        raise NotPermittedError("this link is not one of this mpsctl web", hint=ANOTHER_LINK)

    def knows(self, session: str) -> bool:
        """Tell whether a text is a valid session."""
        with self._lock:
            return _is_among(session, self._sessions)


ANOTHER_LINK: Final = "press Enter in the terminal of mpsctl web for another link, or start it again"


def _is_among(text: str, secret: deque[str]) -> bool:
    """Tell whether a text is one of the secrets, in a time that reveals nothing about the other secrets."""
    raw = text.encode(errors="surrogateescape")
    return any(compare_digest(raw, each.encode()) for each in secret)
