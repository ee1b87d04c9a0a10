"""The catalogue of errors: every refusal and failure of mpsd, with its status and exit code.

The classes are grouped by the party that can resolve the error: the caller, the node's capacity, the operator, MPS, the
GPU, or mpsd itself. A class docstring is the error's documentation, from which docs/reference/errors.md is generated.
`code` is for programs, and `hint` states the remedy for users. This module imports nothing, so `mpsctl` starts fast.
"""


class MpsdError(Exception):
    """The root: one sentence of detail, a hint with the remedy, and the limit that was hit, if any.

    A traceback shows the hint below the sentence, as a note of the exception.
    """

    code = "error"
    status = 500
    exit_code = 1
    retryable = False
    is_answer = False
    """Whether it is mpsd's answer to this program: its hint is then for users of mpsctl."""

    def __init__(self, detail: str, *, hint: str, limit: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.hint = hint
        self.limit = limit

    @property
    def hint(self) -> str:
        return self._hint

    @hint.setter
    def hint(self, hint: str) -> None:
        self._hint = hint
        self.__notes__ = [f"hint: {hint}"]

    def __reduce__(self) -> tuple[object, ...]:
        """Return what makes it again in another process: an exception's own way passes `detail` alone."""
        return _again, (type(self), self.detail, self.hint, self.limit), dict(vars(self))


def _again(kind: type[MpsdError], detail: str, hint: str, limit: str | None) -> MpsdError:
    return kind(detail, hint=hint, limit=limit)


# -- the caller's doing ------------------------------------------------------------------------------------------------


class RequestError(MpsdError):
    """The request cannot be served as it is, and only the caller can fix it; nothing was changed."""

    status = 422
    exit_code = 2


class InvalidRequestError(RequestError):
    """A value is invalid: out of range, of the wrong type, or in an unknown unit."""

    code = "invalid_request"


class RequestIdReusedError(RequestError):
    """The request_id was used for another request, whose lease has not ended; the error names what differs."""

    code = "request_id_reused"


class NotFoundError(RequestError):
    """The route, lease, control daemon or operation does not exist."""

    code = "not_found"
    status = 404
    exit_code = 1


class MethodNotAllowedError(RequestError):
    """The path does not support this method; the `Allow` header lists the methods that it supports."""

    code = "method_not_allowed"
    status = 405


class BodyTooLargeError(RequestError):
    """The request body exceeds the maximum size."""

    code = "body_too_large"
    status = 413


class GateFailedError(RequestError):
    """The processes of a lease that waited for each other do not begin: one is missing, gone, or not verified."""

    code = "gate_failed"
    status = 409
    exit_code = 1


class ForbiddenError(RequestError):
    """Policy, or a lack of rights, forbids the request."""

    status = 403
    exit_code = 77


class NotPermittedError(ForbiddenError):
    """The caller's role does not allow the request, or the request names a process or a lease of another user."""

    code = "not_permitted"


class PeerUnknownError(ForbiddenError):
    """The kernel could not identify the calling process, so no lease can be tied to its life."""

    code = "peer_unknown"


class QuotaError(ForbiddenError):
    """The request exceeds the caller's quota; the error names the quota and what is left of it."""

    code = "quota"


class QuarantinedError(ForbiddenError):
    """Control daemons crashed while the caller's uid or container had pipe access; an administrator can pardon it."""

    code = "quarantined"


class ExceedsDaemonLimitError(ForbiddenError):
    """The request exceeds the limits that the control daemon sets for every client."""

    code = "exceeds_daemon_limit"


class NeverFitsError(RequestError):
    """No GPU of this node could serve the request even if nothing else ran; retrying does not help."""

    code = "never_fits"
    exit_code = 65


class CudaInitializedError(RequestError):
    """CUDA is initialised in the calling process already, which fixed its limits: no lease can change them."""

    code = "cuda_initialized"


# -- the node's capacity -----------------------------------------------------------------------------------------------


class CapacityError(MpsdError):
    """The request is valid, but the node cannot serve it now."""

    status = 409
    exit_code = 75
    retryable = True


class DoesNotFitError(CapacityError):
    """No GPU has this much left; the error names the limiting resource and what is left of it."""

    code = "does_not_fit"
    gpu: str | None = None
    """The UUID of the GPU that came closest, where the error is about one GPU."""


class AlreadyClaimedError(CapacityError):
    """Another holder has taken the claim; a claim can be taken once."""

    code = "already_claimed"
    retryable = False


class DaemonNotReadyError(CapacityError):
    """The GPU's control daemon is not ready, or one of its limits does not hold, so no lease is granted."""

    code = "daemon_not_ready"


class PipeAccessError(CapacityError):
    """Pipe access could not be granted to the caller's uid, or could not be revoked from others."""

    code = "pipe_access"


class QueueFullError(CapacityError):
    """The queue holds the maximum number of waiting requests."""

    code = "queue_full"


class TooManyLeasesError(CapacityError):
    """The node has the maximum number of leases, waiting ones included."""

    code = "too_many_leases"


class TooManyRequestsError(CapacityError):
    """The caller's uid has too many open connections or requests in flight, or mpsd has no file descriptor left."""

    code = "too_many_requests"
    status = 429


class StorageError(CapacityError):
    """The lease could not be stored on disk, so it was not granted: every granted lease must survive mpsd."""

    code = "storage"
    status = 507


class StoppingError(CapacityError):
    """mpsd is stopping; the control daemons keep running, and the next mpsd will answer."""

    code = "stopping"
    status = 503


# -- the operator's doing ----------------------------------------------------------------------------------------------


class OperatorError(MpsdError):
    """The node or its configuration has a fault that an operator must fix."""

    exit_code = 78


class ConfigurationError(OperatorError):
    """The configuration is invalid, or a path or program that it names cannot be used."""

    code = "configuration"


class AlreadyRunningError(OperatorError):
    """Another mpsd uses this runtime directory."""

    code = "already_running"
    exit_code = 1


class ExhaustedError(OperatorError):
    """The machine has no disk space, inode, memory, process or descriptor left for the start of mpsd; retry it."""

    code = "exhausted"
    status = 503
    exit_code = 75
    retryable = True


class ForeignDaemonError(OperatorError):
    """A control daemon that mpsd did not start uses this pipe directory."""

    code = "foreign_daemon"
    status = 409
    exit_code = 1


# -- MPS ---------------------------------------------------------------------------------------------------------------


class ControlError(MpsdError):
    """The conversation on the control pipe between mpsd and a control daemon failed."""

    status = 502
    retryable = True


class ControlUnreachableError(ControlError):
    """No control daemon listens on this pipe directory."""

    code = "control_unreachable"


class ControlBusyError(ControlError):
    """Another front-end occupied the control daemon for longer than the deadline; MPS serves one at a time."""

    code = "control_busy"


class ControlUnresponsiveError(ControlError):
    """The control daemon accepted the conversation and did not finish it within the deadline."""

    code = "control_unresponsive"


class ControlBrokenError(ControlError):
    """The conversation broke off, as it does when the control daemon dies; which commands took effect is unknown."""

    code = "control_broken"
    retryable = False


class ControlGarbledError(ControlError):
    """The control daemon gave an answer that is not valid for the command."""

    code = "control_garbled"
    retryable = False


class ControlUnknownCommandError(ControlError):
    """The control daemon does not know the command; the error names the first driver version that does."""

    code = "control_unknown_command"
    retryable = False


class ControlNoAnswerError(ControlError):
    """The control daemon gave no answer to the command, as it does while a server is busy: the value is unknown."""

    code = "control_no_answer"


class ServerNotFoundError(ControlError):
    """The control daemon has no server with this pid."""

    code = "server_not_found"
    status = 404
    retryable = False


class LimitNotHeldError(ControlError):
    """A limit was set and reads back with a different value, so it does not hold."""

    code = "limit_not_held"
    retryable = False


# -- the GPU -----------------------------------------------------------------------------------------------------------


class GpuError(MpsdError):
    """A GPU or its driver has a fault."""

    status = 503


class NoDriverError(GpuError):
    """NVIDIA's driver library cannot be loaded, or finds no GPU."""

    code = "no_driver"
    exit_code = 78


class GpuUnknownError(GpuError):
    """The GPU's state could not be read; an unknown GPU is not considered healthy."""

    code = "gpu_unknown"
    retryable = True


class ComputeModeError(GpuError):
    """The GPU's compute mode could not be changed; the previous mode is still in force."""

    code = "compute_mode"


# -- mpsd itself -------------------------------------------------------------------------------------------------------


class UnreachableError(MpsdError):
    """No mpsd listens on the socket, or mpsd did not answer `mpsctl` in time."""

    code = "unreachable"
    exit_code = 69
    retryable = True
    socket: str | None = None
    """The path of the socket, where nothing listens on it."""


class UntrustedSocketError(MpsdError):
    """The process that listens on the socket belongs to a user whom `mpsctl` does not trust, so nothing was sent."""

    code = "untrusted_socket"
    status = 403
    exit_code = 77


class JobFailedError(MpsdError):
    """A rank of a job missed MPS or its start, or the job's mpsd ended, so `mpsctl job` ends all ranks of the node."""

    code = "job_failed"


class InternalError(MpsdError):
    """mpsd has a defect; its log has the details."""

    code = "internal"


def error_named(code: str, detail: str, *, hint: str, limit: str | None = None) -> MpsdError:
    """Return the error that has this code; one that the catalogue lacks keeps its code."""
    kind = next((each for each in catalogue() if each.code == code), MpsdError)
    error = kind(detail, hint=hint, limit=limit)
    if kind is MpsdError:
        error.code = code or error.code
    return error


def catalogue() -> list[type[MpsdError]]:
    """Return every error that has its own code, in the order of this file."""
    found: list[type[MpsdError]] = []
    pending = [MpsdError]
    while pending:
        error = pending.pop(0)
        if "code" in vars(error) and error is not MpsdError:
            found.append(error)
        pending[:0] = error.__subclasses__()
    return found
