"""All retries of mpsd: each with a name, a positive predicate, a bound and jitter; the last error is re-raised.

The predicates are positive on purpose: tenacity's negated ones would also retry a cancellation.
"""

import threading

import tenacity


class CollisionError(Exception):
    """The control daemon rejected a front-end, because it serves one at a time; the front-end had no effect."""


class ApiServerAwayError(Exception):
    """The API server of a cluster did not answer, or is too busy to; the message says why."""


def api_server(seconds: float, ended: threading.Event) -> tenacity.Retrying:
    """Retry while the API server is unavailable, for at most this long, or until `ended` is set.

    Then raises ApiServerAwayError. The jitter spreads the load when a thousand nodes find the server back at the same
    time.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(ApiServerAwayError),
        stop=tenacity.stop_after_delay(seconds) | tenacity.stop_when_event_set(ended),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
        sleep=tenacity.sleep_using_event(ended),
        reraise=True,
    )


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
