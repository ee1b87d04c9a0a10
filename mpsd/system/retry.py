"""Every retry of mpsd: named, with a positive predicate, a bound, jitter, and the last error re-raised.

The predicates are positive on purpose: tenacity's negated ones would also retry a cancellation.
"""

import threading

import tenacity


class CollisionError(Exception):
    """A front-end was turned away by the control daemon, which serves one at a time: nothing was done."""


class ApiServerAwayError(Exception):
    """The API server of a cluster did not answer, or is too busy to; the message says why."""


def api_server(seconds: float, ended: threading.Event) -> tenacity.Retrying:
    """Try again while the API server is away, for at most this long, or until `ended` is set.

    Then ApiServerAwayError is raised. The jitter is there for a thousand nodes that find it back at the same moment.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(ApiServerAwayError),
        stop=tenacity.stop_after_delay(seconds) | tenacity.stop_when_event_set(ended),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
        sleep=tenacity.sleep_using_event(ended),
        reraise=True,
    )


def collisions(seconds: float) -> tenacity.AsyncRetrying:
    """Try again while strangers' front-ends are in the way, for at most this long; then CollisionError is raised.

    A bare front-end occupies the daemon for about 2 ms (measured), so the first pause is of that size.
    """
    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(CollisionError),
        stop=tenacity.stop_after_delay(seconds),
        wait=tenacity.wait_random_exponential(multiplier=0.002, max=0.1),
        reraise=True,
    )


def inherited_locks() -> tenacity.Retrying:
    """Try again while a lock is held, for at most a second; then BlockingIOError is raised.

    An mpsd that was killed as it started a program leaves its lock to that child, from the fork to the exec.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(BlockingIOError),
        stop=tenacity.stop_after_delay(1.0),
        wait=tenacity.wait_random_exponential(multiplier=0.01, max=0.1),
        reraise=True,
    )
