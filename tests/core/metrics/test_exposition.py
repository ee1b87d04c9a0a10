"""The parsers of prometheus_client accept both formats of the metrics, and find the same content in them."""

from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from mpsd.core.metrics import families
from mpsd.core.metrics.exposition import (
    OPENMETRICS,
    TEXT,
    Block,
    Histogram,
    counters,
    gauges,
    histograms,
    infos,
    labels,
    negotiated,
    render,
    states,
)

AWKWARD: Final = 'a "quoted"\nline with a \\ and ä'

BLOCKS: Final[tuple[Block, ...]] = (
    infos(families.BUILD, [("0.1.0",)]),
    gauges(families.GPU_MEMORY, {("GPU-0",): 85899345920, (AWKWARD,): 0}),
    counters(families.CPU, {(): 1.5}),
    counters(families.ADMISSIONS, {("granted", ""): 3, ("refused", "quota"): 1}),
    states(families.GPU_HEALTH, {("GPU-0",): "ok"}, ("ok", "faulty")),
)

PARSERS: Final[dict[str, Callable[[str], Iterable[Any]]]] = {TEXT: text_families, OPENMETRICS: openmetrics_families}


def samples(media_type: str, blocks: Iterable[Block]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = render(blocks, media_type).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in PARSERS[media_type](text)
        for sample in family.samples
    }


@pytest.mark.parametrize("media_type", PARSERS)
def test_what_a_parser_reads(media_type: str) -> None:
    """A parser finds every sample with its value and its labels, for any text in the labels."""
    gpu = "gpu"
    assert samples(media_type, BLOCKS) == {
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
    for value in (0.05, 0.1, 0.5, 2.0):
        histogram.observe(value)
    histogram.observe(0.0, 2)
    name = families.GRANT.name
    assert samples(media_type, [histograms(families.GRANT, {(): histogram})]) == {
        (f"{name}_bucket", (("le", "0.1"),)): 4,
        (f"{name}_bucket", (("le", "1.0"),)): 5,
        (f"{name}_bucket", (("le", "+Inf"),)): 6,
        (f"{name}_sum", ()): 2.65,
        (f"{name}_count", ()): 6,
    }


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


def test_labels() -> None:
    """Labels appear in the order of their names; without labels, the text is empty."""
    assert labels(("a", "b"), (1, "x")) == '{a="1",b="x"}'
    assert not labels((), ())
