"""What `leaven plan` says of its own error is what the published rows give."""

import runpy
from pathlib import Path

from leaven.planning.plan import ACCURACY

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "planner_accuracy.py"


def told(errors: list[float]) -> tuple[str, str]:
    """Mean and worst absolute error, rounded as they are printed."""
    return f"{sum(map(abs, errors)) / len(errors):.0%}", f"{max(map(abs, errors)):.0%}"


def test_the_printed_accuracy_is_recomputed_from_every_published_row() -> None:
    benchmark = runpy.run_path(str(BENCHMARK))
    bloom_time, bloom_memory = benchmark["bloom"]()
    mpt_time, _ = benchmark["mpt"]()
    nanotron_time, nanotron_memory = benchmark["nanotron"]()
    assert [len(bloom_time), len(mpt_time), len(nanotron_time), len(bloom_memory)] == [46, 61, 13, 28]
    (time, worst), (memory, worst_memory) = told(bloom_time), told(bloom_memory)
    (mpt, worst_mpt), (nanotron, _), (nano_memory, _) = map(told, (mpt_time, nanotron_time, nanotron_memory))
    assert (
        f"first principles: time {time} off on average over 46 rows of BLOOM (worst {worst}), {mpt} over 61 of MPT "
        f"({worst_mpt}), {nanotron} over 13 of nanotron ({1 / (1 + min(nanotron_time)):.1f}x too fast on 512 GPUs); "
        f"memory {memory} off over 28 rows of BLOOM (worst {worst_memory}), {nano_memory} over 13 of nanotron "
        f"({max(map(abs, nanotron_memory)):.0%}); see docs/log.md"
    ) == ACCURACY
