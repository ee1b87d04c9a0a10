"""The offers of all GPUs of the node, and which of them can grant a request some day. Pure."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Final

from msgspec import structs

from mpsd.core.admission import admission
from mpsd.core.admission.admission import NOTHING, Amount, Candidate, Offer, Shortage
from mpsd.core.errors import DaemonNotReadyError, InvalidRequestError, NeverFitsError, QuotaError
from mpsd.core.model import LeaseRequest

_MOST_SIZES: Final = 1024
"""Sizes of requests whose candidates are cached; a busy node sees a few."""


class Offers:
    """The offers of all GPUs. An instance does not change; other offers make another instance."""

    def __init__(self, by_gpu: Mapping[str, Offer]) -> None:
        self.by_gpu = by_gpu
        whole = NOTHING
        for offer in by_gpu.values():
            whole += Amount(offer.threads, offer.memory, offer.clients)
        self.whole = whole
        self._candidates: dict[tuple[Hashable, ...], tuple[Candidate, ...]] = {}
        """The candidates by the fields of a request that decide them."""

    def named(self, request: LeaseRequest) -> Iterable[Offer]:
        """Return the GPUs that a request names and that its user may use."""
        gpu, among = request.gpu, request.among
        if gpu == "any" and among is None:
            return self.by_gpu.values()
        every = self.by_gpu.values()
        return [each for each in every if gpu in {"any", each.gpu} and (among is None or each.gpu in among)]

    def _capable(self, request: LeaseRequest) -> Iterable[Offer]:
        """Return those of the named GPUs whose driver supports the request's options."""
        named = self.named(request)
        return named if request.client_priority is None else [each for each in named if each.client_priority]

    def has(self, request: LeaseRequest) -> bool:
        """Tell whether this node has as many GPUs as a request needs."""
        return len(list(self.named(request))) >= request.gpus

    def candidates(self, request: LeaseRequest) -> tuple[Candidate, ...]:
        """Return the GPUs that could grant a request some day.

        Raises InvalidRequestError for a request that is incomplete or contradictory.
        """
        size = (
            request.threads,
            request.memory,
            request.fraction,
            request.processes,
            request.gpu,
            request.gpus,
            request.among,
            request.client_priority is None,
        )
        found = self._candidates.get(size)
        if found is None:
            admission.check(request)
            needs = admission.needs(request, self._capable(request))
            found = tuple((offer, need) for offer, need in needs if admission.never(need, offer) is None)
            if len(self._candidates) >= _MOST_SIZES:
                self._candidates.clear()
            self._candidates[size] = found
        return found

    def worth(self, request: LeaseRequest) -> Amount:
        """Return the most that a checked request can need, on any GPU."""
        needs = (need for _, need in admission.needs(request, self.named(request)))
        return max(needs, key=lambda need: need.memory, default=NOTHING) * request.gpus

    def part(self, amount: Amount) -> float:
        """Return an amount's part of the node's threads or of its memory, whichever is greater."""
        threads, memory = self.whole.threads, self.whole.memory
        return max(amount.threads / threads if threads else 0.0, amount.memory / memory if memory else 0.0)

    def why_never(self, request: LeaseRequest) -> Shortage:
        """Say why a request has too few candidates: too few GPUs, or GPUs that have too little."""
        if self.has(request) and len(list(self._capable(request))) < request.gpus:
            because = "client_priority was given, and this driver has no priority of clients: 535 and newer have"
            return Shortage("client_priority", because, "omit client_priority", InvalidRequestError)
        if self.has(request):
            return admission.why_never(admission.needs(request, self.named(request)))
        count, hint = len(list(self.named(request))), "for the reason: mpsctl gpus"
        if request.gpu != "any":
            requested = f"{request.gpu} was requested"
        else:
            requested = "a GPU was requested" if request.gpus == 1 else f"{request.gpus} GPUs were requested"
        if request.among is not None and self.has(structs.replace(request, among=None)):
            may = f"{requested}, but of this node's {len(self.by_gpu)} GPUs you may use {self._listed(request.among)}"
            return Shortage(
                "quota.gpus", may, "request one of those, or ask an administrator to change quota.gpus", QuotaError
            )
        if count:
            return Shortage("gpus", f"{requested}, but this node has {count}", "request fewer GPUs", NeverFitsError)
        return Shortage("gpu", f"{requested}, but mpsd cannot use any at present", hint, DaemonNotReadyError)

    def _listed(self, gpus: Iterable[str]) -> str:
        return ", ".join(gpu for gpu in gpus if gpu in self.by_gpu) or "none"
