"""The parts of the driver, which `Service` runs."""

import os

from mpsd.kubernetes.api_server import ApiServer, Place
from mpsd.kubernetes.dra.driver import Driver
from mpsd.kubernetes.dra.endpoint import Endpoint
from mpsd.kubernetes.dra.publisher import Publisher
from mpsd.kubernetes.parts import Program
from mpsd.kubernetes.service import Service


def run_driver(program: Program, place: Place) -> None:
    """Run the driver, as `Service.run`. Raises ConfigurationError also where its directories cannot be used."""
    settings, server = program.settings, ApiServer(place, program.ended)
    publisher, driver = Publisher(program, server), Driver(program, server)
    Service(
        program,
        endpoints=[Endpoint(program, driver, publisher.kubelet_came)],
        leases=driver,
        server=server,
        threads={
            "board": publisher.watch,
            "slices": publisher.run,
            "pods": driver.follow_pods,
            "status": driver.status.run,
        },
    ).run(node=settings.node, driver=settings.domain, pid=os.getpid())
