"""The offer of a GPU, by its hardware, by the state of its control daemon, and by the settings."""

from mpsd.core import gpus, health, mps_facts
from mpsd.core.admission.admission import Amount, Offer, Refusal
from mpsd.core.model import Daemon, Gpu, GpuView
from mpsd.core.settings import Settings, Users
from mpsd.core.supervision import wedge


def offer(
    gpu: Gpu, view: GpuView, daemon: Daemon, settings: Settings, unleased: Amount, *, knows_many_users: bool
) -> Offer:
    """Return what a GPU offers now; `unleased` is what clients without a lease use of it."""
    reason = health.refusal(view, daemon)
    return Offer(
        gpu=gpu.uuid,
        daemon=daemon.name,
        pipe_directory=daemon.pipe_directory,
        threads=int(1000 * settings.admission.threads_oversubscription),
        memory=max(gpu.memory_total - gpu.memory_reserved - settings.admission.memory_reserve, 0),
        clients=mps_facts.clients_max(gpu.compute_capability, gpus.driver_branch(gpu.driver_version)) - wedge.PLACES,
        limits=settings.default_limits,
        many_users=daemon.process.many_users if daemon.process else settings.daemon.users is Users.MANY,
        knows_many_users=knows_many_users,
        client_priority=daemon.has_client_priority,
        refusal=Refusal(reason.limit, reason.because, reason.hint, reason.uids) if reason is not None else None,
        unleased=unleased,
    )
