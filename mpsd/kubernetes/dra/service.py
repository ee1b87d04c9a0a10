"""The parts of the driver, which `Service` runs."""

import os
import threading
from pathlib import Path

from mpsd.core.errors import ConfigurationError
from mpsd.core.kubernetes.settings import Report, Settings
from mpsd.kubernetes.api_server import ApiServer, Place
from mpsd.kubernetes.board import Board, GpuFollower
from mpsd.kubernetes.dra.driver import Driver
from mpsd.kubernetes.dra.endpoint import Endpoint
from mpsd.kubernetes.dra.prepared_claims import PreparedStore
from mpsd.kubernetes.dra.publisher import PodEvents, Publisher
from mpsd.kubernetes.log import Log
from mpsd.kubernetes.mpsd_client import Mpsd
from mpsd.kubernetes.node_report import NodeReport
from mpsd.kubernetes.service import Service


def run_driver(settings: Settings, log: Log, place: Place) -> None:
    """Run the driver, as `Service.run`. Raises ConfigurationError also where its directories cannot be used."""
    ended, board = threading.Event(), Board()
    mpsd, server = Mpsd(settings.socket, ended), ApiServer(place, ended)
    publisher = Publisher(settings, mpsd=mpsd, api_server=server, board=board, log=log, ended=ended)
    report = NodeReport(settings, mpsd=mpsd, api_server=server, board=board, log=log, ended=ended)
    events = PodEvents(settings.node, server, log, ended)
    directory = Path(settings.kubelet_dir) / "plugins" / settings.driver / "claims"
    try:
        store = PreparedStore(directory, log)
    except OSError as error:
        raise ConfigurationError(
            f"{directory} cannot be used: {error.strerror or error}", hint="see kubelet_dir, and run it as root"
        ) from None
    driver = Driver(
        settings, mpsd=mpsd, api_server=server, board=board, store=store, events=events, log=log, ended=ended
    )
    try:
        driver.clean()
    except OSError as error:
        raise ConfigurationError(
            f"{settings.cdi_dir} cannot be used: {error.strerror or error}", hint="see cdi_dir"
        ) from None
    Service(
        log,
        ended,
        board=board,
        gpu_follower=GpuFollower(settings, mpsd=mpsd, board=board, log=log, ended=ended),
        endpoints=[Endpoint(settings, board=board, driver=driver, log=log, registered=publisher.kubelet_came)],
        leases=driver,
        threads=[events.start, publisher.start, *([report.start] if settings.report is not Report.NEVER else [])],
    ).run(node=settings.node, driver=settings.driver, pid=os.getpid())
