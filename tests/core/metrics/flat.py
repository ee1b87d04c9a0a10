"""Samples by the text that a query has for each."""

from collections.abc import Iterator

from mpsd.core.metrics.families import Kind, Samples


def flat(samples: Samples) -> dict[str, float]:
    """Return the value of each sample by its name and labels, with the labels in the order of their family."""
    return dict(_flat(samples))


def _flat(samples: Samples) -> Iterator[tuple[str, float]]:
    for family, numbers in samples.numbers.items():
        names = (*family.labels, family.name) if family.kind is Kind.STATESET else family.labels
        for labels, value in numbers.items():
            yield _text(family.series, names, labels), value
    for family, histograms in samples.histograms.items():
        for labels, buckets in histograms.items():
            for bound, count in buckets.counts:
                yield _text(f"{family.name}_bucket", (*family.labels, "le"), (*labels, bound)), count
            yield _text(f"{family.name}_sum", family.labels, labels), buckets.sum
            yield _text(f"{family.name}_count", family.labels, labels), buckets.counts[-1][1]


def _text(name: str, names: tuple[str, ...], labels: tuple[str, ...]) -> str:
    pairs = ",".join(f'{each}="{value}"' for each, value in zip(names, labels, strict=True))
    return f"{name}{{{pairs}}}" if pairs else name
