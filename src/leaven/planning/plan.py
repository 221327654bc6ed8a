"""The plan of a run on a cluster: will it fit, how fast, how long."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from leaven.planning.advice import lacking, no_layout
from leaven.planning.arrangement import Arrangement, check_layout
from leaven.planning.blueprint import Blueprint, blueprint
from leaven.planning.breakdown import activation_parts
from leaven.planning.cost import Cost, Price, cost
from leaven.planning.explain import Explanation, explain, not_lines
from leaven.planning.flops import CONVENTION, flops_per_token, hardware_flops_per_token
from leaven.planning.hardware import Cluster
from leaven.planning.implementations import LEAVEN_BF16, Implementation
from leaven.planning.layouts import (
    FILLS,
    Candidate,
    Exploration,
    Job,
    evaluate,
    explore,
    pareto,
    ranked,
    thin_pipeline,
)
from leaven.planning.memory import GIB, Memory, stage_memory
from leaven.planning.ramp import SHARE, RampPlan, Throughput, plan_ramp
from leaven.planning.states import State, states
from leaven.planning.timing import StepTime
from leaven.recipe.batch import Batch
from leaven.recipe.layout import Layout
from leaven.recipe.shape import ModelShape

N_ALTERNATIVES = 5
# What benchmarks/planner_accuracy.py finds: mean and worst error over every usable row of published tables.
ACCURACY = (
    "mean error on published runs: time 6% over 46 rows of BLOOM (worst +18%), 8% over 61 rows of MPT "
    "(worst -26%), 9% over 13 rows of nanotron (worst +32%), 8% over 18 rows of torchtitan (worst -21%); "
    "memory 3% over 33 rows of BLOOM (worst -13%), 4% over 13 rows of nanotron (worst -11%), 5% over 18 "
    "rows of torchtitan (worst -16%); see docs/planner-accuracy.md"
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
class Calibration:
    """Factors on what the planner says, by what runs of this accelerator took: ``runs``, between ``low`` and ``high``
    in time; or by a measurement alone."""

    time: float
    memory: float | None
    runs: int
    low: float
    high: float
    measurement: bool = False

    def __str__(self) -> str:
        runs = "a measurement" if self.measurement else "1 run" if self.runs == 1 else f"{self.runs} runs"
        spread = f" ({self.low:.3g} to {self.high:.3g})" if self.runs > 1 else ""
        return f"x{self.time:.3g} by {runs} on this accelerator{spread}"


@dataclass(frozen=True)
class Plan:
    """One arrangement on a cluster, and what there is beside it, which is computed when it is asked for.

    ``calibration`` is in every time, of the choice and of what is beside it (``job.slower``); ``memory`` is the
    planner's own. A ramp is to keep ``share`` of the full batch's throughput from its start.
    """

    job: Job
    tokens: int
    batch: Batch
    chosen: Candidate
    share: float = SHARE
    calibration: Calibration | None = None

    def but(self, *, calibration: Calibration | None = None, share: float | None = None) -> "Plan":
        """The plan with another calibration or share."""
        calibration, share = calibration or self.calibration, self.share if share is None else share
        slower = calibration.time if calibration else 1.0
        job, chosen = replace(self.job, slower=slower), self.chosen.times(slower / self.job.slower)
        plan = replace(self, job=job, chosen=chosen, calibration=calibration, share=share)
        if "exploration" in vars(self):  # not a second time
            vars(plan)["exploration"] = self.exploration.slower(slower)
        return plan

    @property
    def cluster(self) -> Cluster:
        return self.job.cluster

    @property
    def arrangement(self) -> Arrangement:
        return self.chosen.arrangement

    @property
    def memory(self) -> Memory:
        """Of the rank that needs most."""
        return self.chosen.memory

    @property
    def fits(self) -> bool:
        return self.chosen.fits(self.cluster)

    @property
    def time(self) -> StepTime:
        """Of a step at the full batch."""
        return self.chosen.time

    @cached_property
    def speed(self) -> Speed:
        """At the full batch."""
        model, batch_tokens, step = self.job.model, self.job.batch_tokens, self.time.step
        peak = self.cluster.accelerator.peak_tflops * 1e12
        rate = batch_tokens / step / self.cluster.gpus
        full = flops_per_token(model)
        return Speed(
            tflops_per_gpu=rate * full / 1e12,
            mfu=rate * full / peak,
            mfu_causal=rate * flops_per_token(model, "causal") / peak,
            hfu=rate * hardware_flops_per_token(model, self.arrangement.layout.recompute) / peak,
            step_seconds=step,
            tokens_per_second=batch_tokens / step,
        )

    @cached_property
    def seconds(self) -> float:
        """Of the run, with its ramp."""
        return Throughput(self.job, self.arrangement).run_seconds(self.batch.sizes, self.tokens)

    @property
    def days(self) -> float:
        return self.seconds / 86_400

    @property
    def gpu_hours(self) -> float:
        return self.seconds / 3_600 * self.cluster.gpus

    @cached_property
    def stages(self) -> tuple[Memory, ...]:
        """Memory of each rank of the pipeline."""
        ranks = range(self.arrangement.layout.pp)
        return tuple(stage_memory(self.job.model, self.arrangement, rank, self.job.code) for rank in ranks)

    @property
    def activations(self) -> dict[str, float]:
        """Bytes of the rank that needs most, by operator."""
        totals = [memory.total for memory in self.stages]
        return activation_parts(self.job.model, self.arrangement, totals.index(max(totals)), self.job.code)

    @property
    def states(self) -> tuple[State, ...]:
        """What the whole model keeps for every parameter between steps, each with its reason."""
        model = blueprint(self.job.model)
        matrices = sum(block.matrices + block.experts for block in model.blocks)
        return states(model.params, self.job.code, matrices)

    @cached_property
    def exploration(self) -> Exploration:
        """Every layout of the job with every micro-batch, also where the plan's own was given."""
        return explore(self.job)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All that fit, the best first."""
        return self.exploration.fitting

    @cached_property
    def alternatives(self) -> tuple[Candidate, ...]:
        """The next best layouts that fit, each with its best micro-batch."""
        own = self.arrangement.layout
        others = [other for other in self.exploration.layouts if other.arrangement.layout != own]
        return tuple(others[:N_ALTERNATIVES])

    @cached_property
    def pareto(self) -> tuple[Candidate, ...]:
        """Of what may be chosen, the candidates that no other beats in time and in memory, the fastest first."""
        return tuple(pareto(self.exploration.choices))

    @property
    def untrained(self) -> Candidate | None:
        """A layout that leaven plans and exports but does not train, if it is faster by more than 2%."""
        return self.exploration.untrained

    @cached_property
    def not_lines(self) -> tuple[str, ...]:
        """Why not something near: ``tp 8: all-reduce 38% of the step``."""
        return not_lines(self.exploration, self.chosen)

    @cached_property
    def cautions(self) -> tuple[str, ...]:
        """What is lacking if it does not fit, and what is allowed and against a rule of thumb."""
        found = [] if self.fits else [lacking(self.job, self.chosen)]
        device = self.cluster.accelerator
        if any(of.confidence == "guess" for of in device.sources):
            rest = "MFU and energy" if self.calibration else "time, MFU and energy; --measure calibrates the time"
            found.append(f"the speed of {device.name} is a guess, and with it {rest}")
        layout, m = self.arrangement.layout, self.arrangement.grad_accumulation
        if thin_pipeline(self.arrangement):
            found.append(
                f"{m} micro-batches for a pipeline of {layout.pp}: by rule of thumb it wants {FILLS * layout.pp} or "
                f"more; {self.time.bubble / self.time.step:.0%} of a step is bubble"
            )
        room, factor = self.cluster.accelerator.memory_gib, self.calibration and self.calibration.memory
        context = self.job.code.fixed_gib  # which is no tensor
        took = (self.memory.total / GIB - context) * (factor or 1.0) + context
        if self.fits and took > room:
            found.append(
                f"it fits by the planner, and not by what runs on this accelerator took, x{factor:.3g} of that: "
                f"{took:.3g} GiB of {room:.3g}"
            )
        return tuple(found)

    @cached_property
    def ramp(self) -> RampPlan:
        """Where a ramp in this layout should start, and what it costs."""
        return plan_ramp(self.job, self.arrangement, self.tokens, own=self.batch, share=self.share)

    def explain(self, asked: str) -> Explanation:
        """Why not ``tp=4``. Raises InputError as :func:`leaven.planning.explain.explain`."""
        return explain(self.exploration, self.chosen, asked)

    def cost(self, price: Price | None = None) -> Cost:
        """Time, GPU-hours, energy, and money at a price of a GPU-hour."""
        return cost(self.seconds, self.cluster, price)

    def to_json(self, asked: str | None = None, price: Price | None = None) -> dict[str, Any]:
        """The contract of ``leaven plan --json``; memory in GiB. ``asked``: what to explain."""
        return {
            "layout": self.arrangement.to_json(),
            "memory": {
                "gib": self.memory.total / GIB,
                "fits": self.fits,
                "parts": self.memory.parts_gib,
                "activations": {name: size / GIB for name, size in self.activations.items()},
                "states": [vars(state) for state in self.states],
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
            "alternatives": [_point(other) for other in self.alternatives],
            "cost": self.cost(price).to_json(),
            "stages": [{"gib": memory.total / GIB, "parts": memory.parts_gib} for memory in self.stages],
            "pareto": [_point(candidate) for candidate in self.pareto],
            "untrained": self.untrained and _point(self.untrained),
            "ramp": self.ramp.to_json(),
            "not": list(self.not_lines),
            "cautions": list(self.cautions),
            "calibration": self.calibration
            and vars(self.calibration)
            | {
                "uncalibrated_step_seconds": replace(self.job, slower=1.0).time(self.arrangement).step,
                "says": str(self.calibration),
            },
            **({} if asked is None else {"explain": self.explain(asked).to_json()}),
        }


def _point(candidate: Candidate) -> dict[str, Any]:
    return {
        "layout": candidate.arrangement.to_json(),
        "gib": candidate.memory.total / GIB,
        "step_seconds": candidate.time.step,
    }


def plan(
    model: ModelShape | Blueprint,
    tokens: int,
    batch_tokens: int,
    cluster: Cluster,
    layout: Layout | None = None,
    *,
    micro_batch: int | None = None,
    smallest_tokens: int | None = None,
    code: Implementation = LEAVEN_BF16,
) -> Plan:
    """Plan a run of ``tokens`` tokens in batches of ``batch_tokens``; ``smallest_tokens``: if they ramp, the first.

    Raises:
        InputError: as :func:`plan_job`.
    """
    compiled = layout is not None and layout.compile
    job = Job(model, batch_tokens, cluster, micro_batch, smallest_tokens, code, compile=compiled)
    return plan_job(job, tokens, layout)


def plan_job(job: Job, tokens: int, layout: Layout | None = None, batch: Batch | None = None) -> Plan:
    """Plan a job of ``tokens`` tokens; ``batch`` where it grows.

    Without a layout the fastest that fits is taken. With one, that layout is planned even if it does not fit (then
    ``fits`` is False), with its fastest micro-batch that fits.

    Raises:
        InputError: if a layout, batch or cluster is impossible, or nothing fits; says what would work.
    """
    batch = batch or Batch(tokens=job.batch_tokens)
    if layout is None:
        seen = explore(job)
        if not seen.layouts:
            raise no_layout(seen)
        found = Plan(job, tokens, batch, seen.layouts[0])
        vars(found)["exploration"] = seen  # not a second time
        return found
    check_layout(job.model, layout, job.cluster)
    tried = [evaluate(job.model, how, job.cluster, job.code) for how in job.arrangements(layout)]
    fitting = [candidate for candidate in tried if candidate.fits(job.cluster)]
    # Nothing fits: show the one that comes nearest.
    chosen = ranked(job.model, fitting)[0] if fitting else min(tried, key=lambda candidate: candidate.memory.total)
    return Plan(job, tokens, batch, chosen)
