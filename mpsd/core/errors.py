"""The catalogue of errors: every way in which mpsd says no, for whom, and with which exit code.

An error is named for the one who can do something about it: the caller, the node's capacity, the operator, MPS, the
GPU, or mpsd itself. Its class docstring is its documentation (the README's table is made from it), `code` is what a
program reads, and `hint` is the way out for a person. This module imports nothing, so that `mpsctl` can afford it.
"""


class MpsdError(Exception):
    """The root: one sentence of detail, a hint that says what to do, and the limit that was hit if there was one."""

    code = "error"
    status = 500
    exit_code = 1
    retryable = False

    def __init__(self, detail: str, *, hint: str, limit: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.hint = hint
        self.limit = limit


# -- the caller's doing ------------------------------------------------------------------------------------------------


class RequestError(MpsdError):
    """Something that only the caller can mend; nothing was changed."""

    status = 422
    exit_code = 2


class InvalidRequestError(RequestError):
    """A value that cannot be meant: out of range, of the wrong type, or in an unknown unit."""

    code = "invalid_request"


class NotFoundError(RequestError):
    """There is no such route, lease, daemon or operation."""

    code = "not_found"
    status = 404
    exit_code = 1


class MethodNotAllowedError(RequestError):
    """The path exists, the method does not; `Allow` names those that do."""

    code = "method_not_allowed"
    status = 405


class BodyTooLargeError(RequestError):
    """The request's body is larger than any request of this API can be."""

    code = "body_too_large"
    status = 413


class NotPermittedError(RequestError):
    """The caller's uid has no role that allows this, or names a process or a lease of another user."""

    code = "not_permitted"
    status = 403
    exit_code = 77


class PeerUnknownError(RequestError):
    """The kernel could not say which process is calling, so that nothing can be bound to its life."""

    code = "peer_unknown"
    status = 403
    exit_code = 77


class QuotaError(RequestError):
    """The caller's own quota does not allow it; the quota is named, and what is left of it."""

    code = "quota"
    status = 403
    exit_code = 77


class ExceedsDaemonLimitError(RequestError):
    """More was asked for than the control daemon's own limits give any client."""

    code = "exceeds_daemon_limit"
    status = 403
    exit_code = 77


# -- the node's capacity -----------------------------------------------------------------------------------------------


class CapacityError(MpsdError):
    """The request is sound, and this node cannot serve it now."""

    status = 409
    exit_code = 75
    retryable = True


class DoesNotFitError(CapacityError):
    """No GPU has this much left; the limiting resource and what is left of it are named."""

    code = "does_not_fit"


class NeverFitsError(CapacityError):
    """No GPU of this node has this much even when nothing else runs: asking again will not help."""

    code = "never_fits"
    retryable = False


class DaemonNotReadyError(CapacityError):
    """The GPU's control daemon is not ready, or one of its limits does not hold, so nobody is let in."""

    code = "daemon_not_ready"


class PipeAccessError(CapacityError):
    """The way to a control daemon could not be opened for the caller's uid, or not be closed to others."""

    code = "pipe_access"


class QueueFullError(CapacityError):
    """As many requests wait as may wait."""

    code = "queue_full"


class TooManyLeasesError(CapacityError):
    """As many leases are held, or waited for, as this node keeps."""

    code = "too_many_leases"


class TooManyRequestsError(CapacityError):
    """This uid has as many connections, or requests in flight, as one uid may have."""

    code = "too_many_requests"
    status = 429


class StorageError(CapacityError):
    """The lease could not be put on disk, so it was not granted: what a caller is told survives mpsd."""

    code = "storage"
    status = 507


class StoppingError(CapacityError):
    """mpsd is on its way out; the control daemons stay, and the next mpsd answers."""

    code = "stopping"
    status = 503


# -- the operator's doing ----------------------------------------------------------------------------------------------


class OperatorError(MpsdError):
    """Something about the node or its configuration that an operator must mend."""

    exit_code = 78


class ConfigurationError(OperatorError):
    """The configuration, or a path or program that it names, cannot work."""

    code = "configuration"


class AlreadyRunningError(OperatorError):
    """Another mpsd owns this runtime directory."""

    code = "already_running"
    exit_code = 1


class ForeignDaemonError(OperatorError):
    """A control daemon that mpsd did not start has this pipe directory."""

    code = "foreign_daemon"
    status = 409
    exit_code = 1


# -- MPS ---------------------------------------------------------------------------------------------------------------


class ControlError(MpsdError):
    """Something went wrong on the control pipe between mpsd and a control daemon."""

    status = 502
    retryable = True


class ControlUnreachableError(ControlError):
    """No control daemon listens on this pipe directory."""

    code = "control_unreachable"


class ControlBusyError(ControlError):
    """Somebody else's front-end held the control daemon for longer than the deadline; MPS serves one at a time."""

    code = "control_busy"


class ControlUnresponsiveError(ControlError):
    """The control daemon took the conversation and did not finish it within the deadline."""

    code = "control_unresponsive"


class ControlBrokenError(ControlError):
    """The conversation ended in its middle, as it does when the control daemon dies: what took effect is unknown."""

    code = "control_broken"
    retryable = False


class ControlGarbledError(ControlError):
    """The control daemon answered something that this command does not answer."""

    code = "control_garbled"
    retryable = False


class ControlUnknownCommandError(ControlError):
    """This driver's control daemon does not know the command; the first driver that does is named."""

    code = "control_unknown_command"
    retryable = False


class ControlNoAnswerError(ControlError):
    """The control daemon took the command and said nothing, as it does while a server is busy: the value is unknown."""

    code = "control_no_answer"


class ServerNotFoundError(ControlError):
    """The control daemon has no server of this pid."""

    code = "server_not_found"
    status = 404
    retryable = False


class LimitNotHeldError(ControlError):
    """A limit was set, read back, and is not what was asked: it does not hold."""

    code = "limit_not_held"
    retryable = False


# -- the GPU -----------------------------------------------------------------------------------------------------------


class GpuError(MpsdError):
    """Something about a GPU or its driver."""

    status = 503


class NoDriverError(GpuError):
    """NVIDIA's driver library cannot be loaded, or it finds no GPU."""

    code = "no_driver"
    exit_code = 78


class GpuUnknownError(GpuError):
    """The GPU's state could not be read, and what is unknown is not healthy."""

    code = "gpu_unknown"
    retryable = True


class ComputeModeError(GpuError):
    """The GPU's compute mode could not be changed, so it is as it was."""

    code = "compute_mode"


# -- mpsd itself -------------------------------------------------------------------------------------------------------


class UnreachableError(MpsdError):
    """`mpsctl` found no mpsd on the socket, or none that answered in time."""

    code = "unreachable"
    exit_code = 69
    retryable = True


class InternalError(MpsdError):
    """A defect of mpsd; its log has the details."""

    code = "internal"


def catalogue() -> list[type[MpsdError]]:
    """Every error that has a code of its own, in the order of this file."""
    found: list[type[MpsdError]] = []
    pending = [MpsdError]
    while pending:
        error = pending.pop(0)
        if "code" in vars(error) and error is not MpsdError:
            found.append(error)
        pending[:0] = error.__subclasses__()
    return found
