"""All retries of mpsd: each with a name, a positive predicate, a bound and jitter; the last error is re-raised.

The predicates are positive on purpose: tenacity's negated ones would also retry a cancellation.
"""

import random
import threading
from typing import Final

import tenacity

MOST_JITTER: Final = 1.25
"""By how much `jittered` can lengthen a time."""


def jittered(seconds: float) -> float:
    """Return a random time that is up to a quarter longer, so that a thousand nodes do not act at the same moment."""
    return random.uniform(seconds, MOST_JITTER * seconds)  # noqa: S311 - no secret


class CollisionError(Exception):
    """The control daemon rejected a front-end, because it serves one at a time; the front-end had no effect."""


class ApiServerAwayError(Exception):
    """The API server of a cluster did not answer, or is too busy to; the message says why."""

    def __init__(self, because: str, after: float = 0.0) -> None:
        """`after` is the number of seconds for which the server does not want to be asked again."""
        super().__init__(because)
        self.after = after


def api_server(seconds: float, ended: threading.Event) -> tenacity.Retrying:
    """Retry while the API server is unavailable, for at most this long, or until `ended` is set.

    Then raises ApiServerAwayError. The jitter spreads the load when a thousand nodes find the server back at the same
    time.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(ApiServerAwayError),
        stop=tenacity.stop_before_delay(seconds) | tenacity.stop_when_event_set(ended),
        wait=_as_asked,
        sleep=tenacity.sleep_using_event(ended),
        reraise=True,
    )


_API_SERVER: Final = tenacity.wait_random_exponential(multiplier=0.2, max=5.0)


def _as_asked(state: tenacity.RetryCallState) -> float:
    """Return the seconds until the next attempt, which are not less than the API server asked for."""
    error = state.outcome.exception() if state.outcome is not None else None
    return _API_SERVER(state) + (error.after if isinstance(error, ApiServerAwayError) else 0.0)


def collisions(seconds: float) -> tenacity.AsyncRetrying:
    """Retry while other users' front-ends occupy the daemon, for at most this long; then raise CollisionError.

    A bare front-end occupies the daemon for about 2 ms (measured), so the first pause is of that size.
    """
    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(CollisionError),
        stop=tenacity.stop_after_delay(seconds),
        wait=tenacity.wait_random_exponential(multiplier=0.002, max=0.1),
        reraise=True,
    )


def inherited_locks() -> tenacity.Retrying:
    """Retry while a lock is held, for at most a second; then raise BlockingIOError.

    When mpsd is killed while it starts a program, the child holds the lock from the fork to the exec.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(BlockingIOError),
        stop=tenacity.stop_after_delay(1.0),
        wait=tenacity.wait_random_exponential(multiplier=0.01, max=0.1),
        reraise=True,
    )
