"""What a search of the micro-batch alone has found: the largest that fits, and its margin."""

from __future__ import annotations

from tuner.results.result import Result
from tuner.search_spaces.configuration import Configuration


def micro_batch_sentence(result: Result) -> str:
    """Return which micro-batches fit and with how much memory to spare; "" for another search.

    A micro-batch that was not tried is neither said to fit nor to be too large.
    """
    tried = [each.configuration for each in result.points]
    failed = [Configuration(each.request.launch) for each in result.failures]
    if len({each.micro_batch for each in tried}) < 2 or len({*map(_others, [*tried, *failed])}) > 1:
        return ""
    largest = max(result.points, key=lambda point: point.configuration.micro_batch)
    size = largest.configuration.micro_batch
    text = f"Largest micro-batch that was measured: {size}"
    limit = result.cluster.device.memory_limit_bytes if result.cluster is not None else None
    if largest.peak_memory_bytes is not None and limit:
        free = 1 - largest.peak_memory_bytes / limit
        text += (
            f", with {(limit - largest.peak_memory_bytes) / 1e9:.1f} of {limit / 1e9:.1f} GB of "
            f"its device to spare ({free:.0%})"
        )
    too_large = sorted(
        Configuration(each.request.launch).micro_batch
        for each in result.failures
        if each.failure is not None and each.failure.type.lacks_memory
    )
    if too_large:
        text += f"; {too_large[0]} runs out of memory"
    return f"{text}."


def _others(configuration: Configuration) -> tuple[object, ...]:
    launch = {**configuration.launch, **configuration.live}
    return tuple(sorted((n, value) for n, value in launch.items() if n != "micro_batch"))
