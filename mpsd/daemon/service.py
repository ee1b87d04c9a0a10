"""`mpsd run` from its first line to its last: claim, listen, supervise, reload, and leave the control daemons alone."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple

from mpsd.core import roles
from mpsd.core.admission.ledger import Ledger
from mpsd.core.admission.users import Usage
from mpsd.core.errors import ConfigurationError
from mpsd.core.events import EventName
from mpsd.core.reload import LiveSettings, ReloadResult
from mpsd.core.setting_parsers import UserNames
from mpsd.core.settings import Settings
from mpsd.daemon.accounting.account_store import ACCOUNTS_SCHEMA, AccountStore, stored_usage
from mpsd.daemon.accounting.accountant import Accountant
from mpsd.daemon.api.dispatcher import Dispatcher
from mpsd.daemon.api.routes import ROUTES, Handlers
from mpsd.daemon.control.pipe_access import NodePipeAccess
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.ends.steps import EndStore
from mpsd.daemon.gpu.compute_modes import ComputeModes
from mpsd.daemon.gpu.gpus import Gpus
from mpsd.daemon.http.listener import Listener
from mpsd.daemon.leases.ceilings import Ceilings
from mpsd.daemon.leases.completeness import Completeness
from mpsd.daemon.leases.lease_store import LEASES_BALLAST, LEASES_FIRST, LEASES_SCHEMA, LeaseStore
from mpsd.daemon.leases.leases import Leases
from mpsd.daemon.leases.quarantine import Quarantine
from mpsd.daemon.metrics.collector import Collector
from mpsd.daemon.metrics.endpoint import Endpoint
from mpsd.daemon.node.control_daemons import ControlDaemons
from mpsd.daemon.node.node import Node
from mpsd.daemon.record import log as logs
from mpsd.daemon.record.events import HISTORY_SCHEMA, Events
from mpsd.daemon.record.log import Logger
from mpsd.daemon.service_manager import ServiceNotifier
from mpsd.system.files import path_safety, rundir
from mpsd.system.files.counter import Counter
from mpsd.system.files.database import Database
from mpsd.system.files.rundir import RunDir
from mpsd.system.gpus import driver as drivers
from mpsd.system.gpus.driver import Driver
from mpsd.system.gpus.gpu import GpuSource
from mpsd.system.gpus.saved_compute_modes import SavedComputeModes
from mpsd.system.host.configuration import look_up_names
from mpsd.system.host.notify import ServiceManager
from mpsd.system.mps import control_flags
from mpsd.system.mps.canary import CanaryProgram
from mpsd.system.mps.control_pipe import ControlProgram
from mpsd.system.processes.foreign_reader import ForeignReader
from mpsd.system.sockets import listeners

_SHUTDOWN: Final = 1.0
"""Seconds that the answers in progress may take when mpsd ends."""


_NAMES: Final = 60.0
"""Seconds between two searches for the unknown users and groups of the configuration."""


class StopDaemons(StrEnum):
    """The treatment of the control daemons when mpsd ends."""

    NEVER = "never"
    """They keep running, with their clients, and the next mpsd adopts them."""
    DRAIN = "drain"
    """Admission stops, and each daemon is stopped after its last lease and client; a second signal leaves the others
    running."""
    AT_ONCE = "at once"
    """They are stopped, and their clients with them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of this run of mpsd, decided before anything is changed."""

    settings: Settings
    program: ControlProgram
    source: Callable[[], GpuSource]
    canary: CanaryProgram
    """The client that shows whether servers serve."""
    driver: Driver | None
    """The location of NVIDIA's driver; None: it is simulated."""
    simulated: bool
    private: bool
    """Whether `--root` limits the node to users that can traverse that directory."""
    reread: Callable[[], Settings]
    """Reads the configuration again. Raises ConfigurationError."""
    stop_daemons: StopDaemons = StopDaemons.NEVER
    stop_now: bool = False
    """Whether mpsd ends once the state of the control daemons is known, because it only has to stop them."""
    settle: bool = False
    """Whether the API answers only once it is known whether each control daemon can be used."""
    announce: Callable[[], None] = lambda: None
    """Called once when the API answers."""
    farewell: Callable[[int, int], None] = lambda _left, _of: None
    """Called at the end, with the number of control daemons that keep running, and of all."""
    reader: ForeignReader = field(default_factory=ForeignReader)
    manager: ServiceManager = field(default_factory=ServiceManager)
    """The service manager that started this mpsd and receives its notifications."""


async def serve(plan: Plan) -> None:
    """Run the service until SIGTERM or SIGINT.

    Raises ConfigurationError, AlreadyRunningError, NoDriverError and GpuUnknownError, all before anything is started.
    """
    # With another umask, a control daemon would open its privileged socket to all users, or close its log to its
    # clients.
    os.umask(0o022)
    settings = await look_up_names(plan.settings, UserNames(), plan.reader)
    plan, source = replace(plan, settings=settings), plan.source()
    try:
        inventory = await source.inventory()
        names = [f"gpu{index}" for index in (*(gpu.index for gpu in inventory.gpus), *inventory.unknown)]
        rundir.check(settings, names, private=plan.private)
        settings = await control_flags.check(plan.program, settings, can=control_flags.many_users_can(inventory.gpus))
        plan = replace(plan, settings=settings)
        run_dir = RunDir.claim(settings)
        with contextlib.ExitStack() as stack:
            stack.callback(run_dir.close)
            if plan.driver is not None:
                drivers.link(plan.driver, run_dir.libraries)
            stores = stack.enter_context(_opened(run_dir, settings))
            log = logs.configure(settings.log.format, stores.events.record, journal=plan.manager.journal)
            stack.callback(log.close)
            stack.callback(logs.LibraryReports(log).close)
            _report(log, stores)
            node = _node(plan, source, run_dir, stores, log)
            accountant = Accountant(AccountStore(stores.accounts), node.settings, log)
            node.leases.group_commit.committed.connect(accountant.note)
            node.violation_monitor.measured.connect(accountant.note_held)
            _report_names(settings, log)
            await node.open(inventory)
            await _run(plan, node, stores.events, accountant, log)
    finally:
        await plan.reader.close()
        source.close()


class _Stores(NamedTuple):
    history: Database
    leases: Database
    accounts: Database
    events: Events


@contextlib.contextmanager
def _opened(run_dir: RunDir, settings: Settings) -> Iterator[_Stores]:
    """Open the stores, and continue the events of an earlier mpsd."""
    with (
        closing(Database(run_dir.history, HISTORY_SCHEMA, lasting=True)) as history,
        closing(Database(run_dir.leases, LEASES_SCHEMA, ballast=LEASES_BALLAST, first=LEASES_FIRST)) as leases,
        closing(Database(run_dir.accounts, ACCOUNTS_SCHEMA, lasting=True)) as accounts,
        closing(Counter(run_dir.last_event)) as counter,
        closing(Events(history, counter, count=settings.api.events, age=settings.api.events_age)) as events,
    ):
        yield _Stores(history, leases, accounts, events)


def _report(log: Logger, stores: _Stores) -> None:
    """Log the problems of the stores that an earlier mpsd left, and later problems of the events."""
    stores.events.unstored.connect(lambda because: log.error(EventName.STORE_FULL, because=because))
    stores.events.rewritten.connect(lambda because: log.error(EventName.STORE_REWRITTEN, because=because))
    for database in (stores.leases, stores.history, stores.accounts):
        if database.aside is not None:
            log.error(EventName.STORE_SET_ASIDE, because=database.because, file=str(database.aside))
    if stores.events.lost:
        log.error(EventName.EVENTS_LOST, because=stores.events.lost)


def _node(plan: Plan, source: GpuSource, run_dir: RunDir, stores: _Stores, log: Logger) -> Node:
    """Compose the node: each part gets the parts that it uses. The owner of two parts connects their signals."""
    settings, half_life = LiveSettings(plan.settings), plan.settings.admission.usage_half_life
    gpus = Gpus(source, ComputeModes(source, SavedComputeModes(run_dir.saved_compute_modes), log), log)
    ledger = Ledger(plan.settings.admission, Usage(half_life, stored_usage(stores.accounts, half_life)))
    quarantine = Quarantine(run_dir.quarantines, settings, log)
    pipe_access = NodePipeAccess(run_dir.daemon, ledger, quarantine, settings=settings, log=log)
    endings = Endings(EndStore(run_dir.ends), settings, log)
    lease_store = LeaseStore(stores.leases)
    completeness = Completeness(lease_store, log)
    leases = Leases(
        ledger,
        lease_store,
        completeness,
        Ceilings(settings, pipe_access, completeness),
        endings=endings,
        events=stores.events,
        settings=settings,
        reader=plan.reader,
        log=log,
    )
    control_daemons = ControlDaemons(
        plan.program,
        plan.canary,
        knows_many_users=plan.driver is None,
        gpus=gpus,
        leases=leases,
        pipe_access=pipe_access,
        quarantine=quarantine,
        endings=endings,
        settings=settings,
        reader=plan.reader,
        log=log,
    )
    return Node(
        gpus,
        control_daemons,
        leases,
        pipe_access=pipe_access,
        quarantine=quarantine,
        endings=endings,
        run_dir=run_dir,
        settings=settings,
        reader=plan.reader,
        log=log,
        simulated=plan.simulated,
    )


async def _run(plan: Plan, node: Node, events: Events, accountant: Accountant, log: Logger) -> None:
    # The order is that of what callers may rely on.
    # Start: 1. the socket, so that callers wait instead of failing; 2. where they already wait, or mpsd only stops
    # control daemons, the state of each daemon; 3. answers; 4. the word to the service manager, which starts others.
    # End: 1. callers at a socket of the manager are left to the next mpsd; 2. no new grants; 3. a drain, while the API
    # still answers; 4. the socket's name goes; 5. the last event, and only then the followers' connections;
    # 6. control daemons that end at once.
    notifier = ServiceNotifier(plan.manager, node, log)
    reload = partial(_reload, plan, node, notifier, log, asyncio.Lock())
    listening, withdraw = _listen(plan, log)
    collector = Collector(node, log)
    handlers = Handlers(node, events, accountant, collector, reload)
    dispatcher = Dispatcher(ROUTES, handlers, user_groups=node.user_groups, settings=node.settings, log=log)
    api = Listener(dispatcher.receive, listening, node.settings, log)
    over, at_once, hang_up = _heed_signals()
    log.info(EventName.NODE_STARTED, **_facts(plan), simulated=plan.simulated)
    try:
        async with asyncio.TaskGroup() as group:
            endpoint = Endpoint(node, collector, log)
            parts = (node.run(), accountant.run(node, events), notifier.run(), events.run(), endpoint.run())
            follow = (_renew_names(node.settings, plan.reader, log), _reload_on(hang_up, reload))
            tasks = [group.create_task(each) for each in (*parts, *follow)]
            if plan.manager.listener is not None or plan.stop_now or plan.settle:
                # Clients that waited at the socket must not get answers with an unknown state.
                await asyncio.sleep(0)
                await node.control_daemons.until_known(plan.settings.daemon.answer_deadline)
            serving = group.create_task(api.run())
            log.info(EventName.API_LISTENING, socket=str(plan.settings.socket), mode=f"{plan.settings.api.mode:04o}")
            await asyncio.sleep(0)
            notifier.ready()
            plan.announce()
            await _end_of(over, at_once=plan.stop_now)
            notifier.stopping()
            log.info(EventName.NODE_STOPPING, stop_daemons=plan.stop_daemons)
            if plan.manager.listener is not None and plan.stop_daemons is StopDaemons.NEVER:
                await api.leave()
            await node.leave()
            if plan.stop_daemons is StopDaemons.DRAIN:
                await _drain(node, at_once, group)
            withdraw()
            log.info(EventName.NODE_STOPPED, because="mpsd ends, and has no more events; the next one has")
            events.close()
            serving.cancel()
            await api.empty(_SHUTDOWN)
            if plan.stop_daemons is StopDaemons.AT_ONCE:
                await node.control_daemons.stop(force=True)
            left = [each.process is not None for each in node.control_daemons.all()]
            for each in tasks:
                each.cancel()
        notifier.ended(sum(left), of=len(left))
        plan.farewell(sum(left), len(left))
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # the loop's handler ends with the loop
        withdraw()
        await api.empty(_SHUTDOWN)
        listening.close()
        plan.manager.close()


async def _end_of(over: asyncio.Event, *, at_once: bool) -> None:
    """Wait until mpsd is told to end; an mpsd that only stops control daemons is from the start."""
    if at_once:
        over.set()
    await over.wait()


def _facts(plan: Plan) -> dict[str, str]:
    """Return where the driver is, or the program that stands for it."""
    return {"program": " ".join(plan.program.argv)} if plan.driver is None else plan.driver.facts()


def _heed_signals() -> tuple[asyncio.Event, asyncio.Event, asyncio.Event]:
    """Handle signals. Returns the events that are set to end mpsd, to end it at once, and to reload (SIGHUP)."""
    over, at_once, hang_up = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def end() -> None:
        (at_once if over.is_set() else over).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGHUP, hang_up.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # a signal since the start is handled now
    return over, at_once, hang_up


async def _drain(node: Node, at_once: asyncio.Event, group: asyncio.TaskGroup) -> None:
    """Stop each control daemon after its last lease and client; a second signal leaves the others running."""
    stopping = group.create_task(node.control_daemons.stop(force=False))
    hurried = group.create_task(at_once.wait())
    await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    hurried.cancel()


def _listen(plan: Plan, log: Logger) -> tuple[socket.socket, Callable[[], None]]:
    """Return the API's socket, and a function that removes its name; it does nothing for a socket of the manager.

    Raises ConfigurationError.
    """
    api, path, handed = plan.settings.api, plan.settings.socket, plan.manager.listener
    gid = plan.settings.names.gids.get(api.group)
    if handed is None:
        stranger = path_safety.stranger_at(path)
        if stranger is not None:
            log.warning(EventName.SOCKET_REPLACED, socket=str(path), uid=stranger)
        return listeners.publish(path, api.mode, gid), lambda: listeners.unpublish(path)
    listeners.check_published(handed, path, api.mode, api.group, gid)
    return handed, lambda: None


async def _reload(
    plan: Plan, node: Node, notifier: ServiceNotifier, log: Logger, one_at_a_time: asyncio.Lock
) -> ReloadResult:
    """Reload the configuration as a whole, or keep the old one and report that. Raises ConfigurationError."""
    async with one_at_a_time:
        notifier.reloading()
        try:
            wanted = await look_up_names(plan.reread(), node.settings.current.names, plan.reader)
            rundir.check_acl_support(wanted)
            can = control_flags.many_users_can(node.gpus.by_index.values())
            wanted = await control_flags.check(plan.program, wanted, can=can)
        except ConfigurationError as error:
            log.error(EventName.SETTINGS_REFUSED, because=error.detail, hint=error.hint)
            notifier.reloaded(refused=error.detail)
            raise
        applied, waiting = node.settings.reload(wanted)
        daemons = {each.name: list(each.restart_for) for each in node.control_daemons.all() if each.restart_for}
        log.info(EventName.SETTINGS_RELOADED, applied=list(applied), needs_restart=list(waiting), daemons=daemons)
        _report_names(wanted, log)
        notifier.reloaded()
        return ReloadResult(applied, waiting, daemons, roles.unknown_names(wanted.names))


async def _reload_on(hang_up: asyncio.Event, reload: Callable[[], Awaitable[ReloadResult]]) -> None:
    """Reload on each signal, which has no answer: the log and the service manager get the result."""
    while True:
        await hang_up.wait()
        hang_up.clear()
        with contextlib.suppress(ConfigurationError):
            await reload()


async def _renew_names(settings: LiveSettings, reader: ForeignReader, log: Logger) -> None:
    """Look up names again that the user database did not have, or did not say in time, until cancelled."""
    while True:
        await asyncio.sleep(_NAMES)
        if settings.current.names.unknown:
            before = settings.current
            found = await look_up_names(before, before.names, reader)
            if settings.current is before and found.names != before.names:
                settings.reload(found)
                _report_names(found, log)


def _report_names(settings: Settings, log: Logger) -> None:
    """Log the unknown users and groups of the configuration: a misspelled quota applies to no user."""
    because = roles.unknown_names(settings.names)
    if because:
        log.warning(EventName.NAMES_UNKNOWN, because=because, hint=roles.UNKNOWN_NAMES_HINT)
