"""Every retry of mpsd: named, with a positive predicate, a bound, jitter, and the last error re-raised.

The predicates are positive on purpose: tenacity's negated ones would also retry a cancellation.
"""

import tenacity


class CollisionError(Exception):
    """A front-end was turned away by the control daemon, which serves one at a time: nothing was done."""


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
