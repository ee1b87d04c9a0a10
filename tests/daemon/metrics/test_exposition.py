"""Both formats of the metrics have the same content, and which one a scraper gets."""

import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from mpsd.core.metrics import families
from mpsd.core.metrics.families import Family, Histogram, Samples, states
from mpsd.daemon.metrics.collector import OPENMETRICS, TEXT, negotiated
from mpsd.daemon.metrics.exposition import render

AWKWARD: Final = 'a "quoted"\nline with a \\ and ä'

SAMPLES: Final = Samples(
    {
        families.BUILD: {("0.1.0",): 1},
        families.GPU_MEMORY: {("GPU-0",): 85899345920, (AWKWARD,): 0},
        families.CPU: {(): 1.5},
        families.ADMISSIONS: {("granted", ""): 3, ("refused", "quota"): 1},
        families.GPU_HEALTH: states({("GPU-0",): "ok"}, ("ok", "faulty")),
    },
    {},
)

PARSERS: Final[dict[str, Callable[[str], Iterable[Any]]]] = {TEXT: text_families, OPENMETRICS: openmetrics_families}


def parsed(media_type: str, samples: Samples) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = render(samples, media_type).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in PARSERS[media_type](text)
        for sample in family.samples
    }


@pytest.mark.parametrize("media_type", PARSERS)
def test_what_a_parser_reads(media_type: str) -> None:
    """A parser finds every sample with its value and its labels, for any text in the labels, and no other sample."""
    gpu = "gpu"
    assert parsed(media_type, SAMPLES) == {
        ("mpsd_build_info", (("version", "0.1.0"),)): 1,
        ("mpsd_gpu_memory_bytes", ((gpu, "GPU-0"),)): 85899345920,
        ("mpsd_gpu_memory_bytes", ((gpu, AWKWARD),)): 0,
        ("mpsd_process_cpu_seconds_total", ()): 1.5,
        ("mpsd_admissions_total", (("code", ""), ("outcome", "granted"))): 3,
        ("mpsd_admissions_total", (("code", "quota"), ("outcome", "refused"))): 1,
        ("mpsd_gpu_health", ((gpu, "GPU-0"), ("mpsd_gpu_health", "ok"))): 1,
        ("mpsd_gpu_health", ((gpu, "GPU-0"), ("mpsd_gpu_health", "faulty"))): 0,
    }


@pytest.mark.parametrize("media_type", PARSERS)
def test_a_histogram(media_type: str) -> None:
    """Buckets are cumulative and include their bounds, and the last includes all values. Sum and count are exact."""
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 2.0, 0.0, 0.0):
        histogram.observe(value)
    name = families.GRANT.name
    assert parsed(media_type, Samples({}, {families.GRANT: {(): histogram.buckets()}})) == {
        (f"{name}_bucket", (("le", "0.1"),)): 4,
        (f"{name}_bucket", (("le", "1.0"),)): 5,
        (f"{name}_bucket", (("le", "+Inf"),)): 6,
        (f"{name}_sum", ()): 2.65,
        (f"{name}_count", ()): 6,
    }


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (families.GPU_MEMORY, "# HELP {0} {1}\n# TYPE {0} gauge\n# UNIT {0} bytes\n"),
        (families.BUILD, "# HELP {0} {1}\n# TYPE {0} info\n"),
    ],
)
def test_metadata(family: Family, text: str) -> None:
    """OpenMetrics has the type, the help and the unit of each family."""
    assert text.format(family.name, family.help) in render(SAMPLES, OPENMETRICS).decode()


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/plain", TEXT),
        ("application/json", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text; version=1.0.0", OPENMETRICS),
        ("application/openmetrics-text; version=0.0.1", TEXT),
        ("application/openmetrics-text; q=0", TEXT),
        ("application/openmetrics-text; q=0.4, text/plain; q=0.5", TEXT),
        ("text/plain;version=0.0.4;q=0.5,application/openmetrics-text", OPENMETRICS),
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5",
            OPENMETRICS,
        ),
        (",;q=x,,;;=,\udcff/\x00;q=9", TEXT),
    ],
)
def test_the_form_that_is_asked_for(accept: str, media_type: str) -> None:
    """A scraper that prefers OpenMetrics gets OpenMetrics. The fifth header from the end is that of Prometheus 2.42."""
    assert negotiated(accept) == media_type


def test_a_start_does_without_it() -> None:
    """The first scrape imports prometheus_client, and not the start of mpsd."""
    program = "import sys, mpsd.daemon.service; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
