"""The plan of a run on a cluster: will it fit, how fast, how long."""

from dataclasses import dataclass
from typing import Any

from leaven.planning.arrangement import Arrangement, arrangements, check_layout, parse_layout
from leaven.planning.flops import CONVENTION, flops_per_token, hardware_flops_per_token
from leaven.planning.hardware import Cluster, parse_cluster
from leaven.planning.layouts import Candidate, evaluate, ranked, search
from leaven.planning.memory import GIB, LEAVEN_BF16, Implementation, Memory
from leaven.planning.timing import StepTime
from leaven.recipe.errors import InputError
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape

N_ALTERNATIVES = 5
# What benchmarks/planner_accuracy.py finds: mean and worst error over every usable row of published tables.
ACCURACY = (
    "mean error on published runs: time 6% over 46 rows of BLOOM (worst +18%), 8% over 61 rows of MPT (worst "
    "-26%), 9% over 13 rows of nanotron (worst +32%), 9% over 18 rows of torchtitan (worst -21%); memory 3% over "
    "33 rows of BLOOM (worst -13%), 4% over 13 rows of nanotron (worst -11%), 5% over 18 rows of torchtitan "
    "(worst -16%); see docs/planner-accuracy.md"
)


@dataclass(frozen=True)
class Speed:
    """Of one GPU, except ``step_seconds`` and ``tokens_per_second``, which are of the cluster.

    MFU under three conventions: full attention matrix (comparable with PaLM, Llama, MPT), causal half of it, and
    with recomputation counted (HFU).
    """

    tflops_per_gpu: float
    mfu: float
    mfu_causal: float
    hfu: float
    step_seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class Plan:
    """One arrangement on a cluster with its cost, and the next best ones."""

    cluster: Cluster
    arrangement: Arrangement
    memory: Memory
    fits: bool
    time: StepTime
    speed: Speed
    seconds: float
    alternatives: tuple[Candidate, ...]

    @property
    def days(self) -> float:
        return self.seconds / 86_400

    @property
    def gpu_hours(self) -> float:
        return self.seconds / 3_600 * self.cluster.gpus

    def to_json(self) -> dict[str, Any]:
        """The contract of ``leaven plan --json``; memory in GiB."""
        return {
            "layout": self.arrangement.to_json(),
            "memory": {
                "gib": self.memory.total / GIB,
                "fits": self.fits,
                "parts": self.memory.parts_gib,
            },
            "speed": {
                "tflops_per_gpu": self.speed.tflops_per_gpu,
                "mfu": self.speed.mfu,
                "step_seconds": self.speed.step_seconds,
                "tokens_per_second": self.speed.tokens_per_second,
            },
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            "flops_convention": CONVENTION,
            "alternatives": [
                {
                    "layout": other.arrangement.to_json(),
                    "gib": other.memory.total / GIB,
                    "step_seconds": other.time.step,
                }
                for other in self.alternatives
            ],
        }


def plan_recipe(recipe: Recipe, gpus: str, layout: str | None = None) -> Plan:
    """Plan a recipe on ``64xH100-80GB``, in a layout written ``tp=8,pp=12,zero=1,mbs=2`` or in the best one.

    Raises:
        InputError: as :func:`plan`, and for a recipe in fp32, of which no measured speed is known.
    """
    if recipe.precision.compute != "bf16":
        raise InputError(
            f"the planner knows accelerators in bf16, this recipe computes in {recipe.precision.compute}; "
            f"plan it with --set precision.compute=bf16"
        )
    cluster = parse_cluster(gpus)
    asked, micro_batch = parse_layout(layout, cluster.gpus) if layout else (None, None)
    if micro_batch is None and recipe.batch.micro_batch != "auto":
        micro_batch = recipe.batch.micro_batch
    return plan(
        recipe.model,
        recipe.data.tokens,
        recipe.batch.tokens,
        cluster,
        asked,
        micro_batch=micro_batch,
        smallest_tokens=min(tokens for _, tokens in recipe.batch.sizes),
    )


def plan(
    shape: ModelShape,
    tokens: int,
    batch_tokens: int,
    cluster: Cluster,
    layout: Layout | None = None,
    *,
    micro_batch: int | None = None,
    smallest_tokens: int | None = None,
    code: Implementation = LEAVEN_BF16,
) -> Plan:
    """Plan a run of ``tokens`` tokens in batches of ``batch_tokens``, the first of ``smallest_tokens`` if they ramp.

    Without a layout the fastest that fits is taken, and the next ones are alternatives. With one, that layout is
    planned even if it does not fit (then ``fits`` is False), with its fastest micro-batch that fits.

    Raises:
        InputError: if a layout, batch or cluster is impossible, or nothing fits; says what would work.
    """
    if layout is None:
        best, *others = search(shape, batch_tokens, cluster, micro_batch, code=code, smallest_tokens=smallest_tokens)
    else:
        check_layout(shape, layout, cluster)
        possible = arrangements(shape, layout, batch_tokens, micro_batch, smallest_tokens)
        tried = [evaluate(shape, how, cluster, code) for how in possible]
        fitting = [candidate for candidate in tried if candidate.fits(cluster)]
        # Nothing fits: show the one that comes nearest.
        best, *others = ranked(shape, fitting) or sorted(tried, key=lambda c: c.memory.total)[:1]
    step = best.time.step
    peak = cluster.accelerator.peak_tflops * 1e12
    rate = batch_tokens / step / cluster.gpus
    full = flops_per_token(shape)
    return Plan(
        cluster=cluster,
        arrangement=best.arrangement,
        memory=best.memory,
        fits=best.fits(cluster),
        time=best.time,
        speed=Speed(
            tflops_per_gpu=rate * full / 1e12,
            mfu=rate * full / peak,
            mfu_causal=rate * flops_per_token(shape, "causal") / peak,
            hfu=rate * hardware_flops_per_token(shape, best.arrangement.layout.recompute) / peak,
            step_seconds=step,
            tokens_per_second=batch_tokens / step,
        ),
        seconds=-(-tokens // batch_tokens) * step,
        alternatives=tuple(others[:N_ALTERNATIVES]),
    )
