"""The plan of a run on a cluster: whether it fits, how fast it is and how long it takes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from leaven.documents.planning import (
    CalibrationRow,
    CandidateRow,
    CostRow,
    Explanation,
    MemoryPlan,
    PlanDocument,
    Price,
    RampPlan,
    SpeedPlan,
    StageMemory,
    StateRow,
)
from leaven.planning.arrangement import Arrangement, check_layout, parse_layout
from leaven.planning.blueprint import Model, blueprint
from leaven.planning.cost import cost
from leaven.planning.explain import explain, lacking, no_layout, not_lines
from leaven.planning.flops import CONVENTION, flops_per_token, hardware_flops_per_token
from leaven.planning.hardware import Cluster, parse_cluster
from leaven.planning.layouts import (
    FILLS,
    Exploration,
    Job,
    LayoutCandidate,
    evaluate,
    explore,
    pareto,
    ranked,
    thin_pipeline,
)
from leaven.planning.memory import GIB, Memory, activation_parts, stage_memory
from leaven.planning.ramp import SHARE, RampThroughput, plan_ramp
from leaven.planning.timing import StepTime
from leaven.planning.training_codes import (
    LEAVEN_BF16,
    TRAINING_CODES,
    Moments,
    TrainingCode,
    in_precision,
    states,
)
from leaven.recipe.batch import Batch
from leaven.recipe.errors import InputError
from leaven.recipe.layout import Layout

if TYPE_CHECKING:
    from leaven.planning.calibration import Calibration, CalibrationRecord
    from leaven.recipe.recipe import Recipe

N_ALTERNATIVES = 5
# What benchmarks/planner_accuracy.py finds: mean and worst error over every usable row of published tables.
ACCURACY = (
    "mean error on published runs: time 6% over 46 rows of BLOOM (worst +18%), 8% over 61 rows of MPT "
    "(worst -26%), 9% over 13 rows of nanotron (worst +32%), 8% over 18 rows of torchtitan (worst -21%); "
    "memory 3% over 33 rows of BLOOM (worst -13%), 4% over 13 rows of nanotron (worst -11%), 5% over 18 "
    "rows of torchtitan (worst -16%); see docs/planner-accuracy.md"
)


@dataclass(frozen=True)
class ClusterPlan:
    """One arrangement on a cluster. Everything that follows from it is computed when it is first read.

    Every time of the plan, also of other layouts, includes the calibration (``job.slower``). ``memory`` does not: it
    is the planner's own count.
    """

    job: Job
    tokens: int  # of the run
    batch: Batch
    chosen: LayoutCandidate
    share: float = SHARE  # of the full batch's throughput that a ramp must keep from its start
    calibration: "Calibration | None" = None

    def changed(self, *, calibration: "Calibration | None" = None, share: float | None = None) -> "ClusterPlan":
        """Return the plan with another calibration or share."""
        calibration, share = calibration or self.calibration, self.share if share is None else share
        slower = calibration.time if calibration else 1.0
        job, chosen = replace(self.job, slower=slower), self.chosen.times(slower / self.job.slower)
        plan = replace(self, job=job, chosen=chosen, calibration=calibration, share=share)
        if "exploration" in vars(self):  # reuse the search
            vars(plan)["exploration"] = self.exploration.slower(slower)
        return plan

    def calibrated(self, records: "Iterable[CalibrationRecord]", compute: str) -> "ClusterPlan":
        """Return the plan with the factors that the records of its accelerator give for this compute dtype."""
        from leaven.planning.calibration import calibration

        layout, accelerator = self.arrangement.layout, self.cluster.accelerator.name
        found = calibration(records, accelerator, self.job.model.params, layout, compute)
        return self if found is None else self.changed(calibration=found)

    @property
    def cluster(self) -> Cluster:
        return self.job.cluster

    @property
    def arrangement(self) -> Arrangement:
        return self.chosen.arrangement

    @property
    def memory(self) -> Memory:
        """Memory of the rank that needs most."""
        return self.chosen.memory

    @property
    def fits(self) -> bool:
        return self.chosen.fits(self.cluster)

    @property
    def time(self) -> StepTime:
        """Time of a step at the full batch."""
        return self.chosen.time

    @cached_property
    def speed(self) -> SpeedPlan:
        """Speed at the full batch."""
        model, batch_tokens, step = self.job.model, self.job.batch_tokens, self.time.step
        peak = self.cluster.accelerator.peak_tflops * 1e12
        rate = batch_tokens / step / self.cluster.gpus
        full = flops_per_token(model)
        return SpeedPlan(
            tflops_per_gpu=rate * full / 1e12,
            mfu=rate * full / peak,
            mfu_causal=rate * flops_per_token(model, "causal") / peak,
            hfu=rate * hardware_flops_per_token(model, self.arrangement.layout.recompute) / peak,
            step_seconds=step,
            tokens_per_second=batch_tokens / step,
        )

    @cached_property
    def seconds(self) -> float:
        """Seconds of the run, including its batch ramp."""
        return RampThroughput(self.job, self.arrangement).run_seconds(self.batch.sizes, self.tokens)

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
        """Bytes of activations by operator, on the rank that needs the most memory."""
        totals = [memory.total for memory in self.stages]
        return activation_parts(self.job.model, self.arrangement, totals.index(max(totals)), self.job.code)

    @property
    def states(self) -> list[StateRow]:
        """What the whole model keeps for every parameter between steps, each with its reason."""
        model = blueprint(self.job.model)
        matrices = sum(block.matrices + block.experts for block in model.blocks)
        return states(model.params, self.job.code, matrices)

    @cached_property
    def exploration(self) -> Exploration:
        """The search over all layouts and micro-batches. It also runs if the plan's own layout was given."""
        return explore(self.job)

    @property
    def candidates(self) -> tuple[LayoutCandidate, ...]:
        """All arrangements that fit, the best first."""
        return self.exploration.fitting

    @cached_property
    def alternatives(self) -> tuple[LayoutCandidate, ...]:
        """The next best layouts that fit, each with its best micro-batch."""
        own = self.arrangement.layout
        others = [other for other in self.exploration.layouts if other.arrangement.layout != own]
        return tuple(others[:N_ALTERNATIVES])

    @cached_property
    def pareto(self) -> tuple[LayoutCandidate, ...]:
        """The choices that no other beats in both time and memory, the fastest first."""
        return tuple(pareto(self.exploration.choices))

    @property
    def untrained(self) -> LayoutCandidate | None:
        """A layout that leaven plans and exports but cannot train, if it is more than 2% faster."""
        return self.exploration.untrained

    @cached_property
    def not_lines(self) -> tuple[str, ...]:
        """Why the neighbouring layouts were not chosen: ``tp 8: all-reduce 38% of the step``."""
        return not_lines(self.exploration, self.chosen)

    @cached_property
    def cautions(self) -> tuple[str, ...]:
        """Warnings: what does not fit, and what is allowed but breaks a rule of thumb."""
        found = [] if self.fits else [lacking(self.job, self.chosen)]
        device = self.cluster.accelerator
        if any(of.confidence == "guess" for of in device.sources):
            rest = "MFU and energy" if self.calibration else "time, MFU and energy; --measure calibrates the time"
            found.append(f"the speed of {device.name} is a guess, and with it {rest}")
        layout, m = self.arrangement.layout, self.arrangement.grad_accumulation
        if thin_pipeline(self.arrangement):
            found.append(
                f"{m} micro-batches for a pipeline of {layout.pp}; the rule of thumb is {FILLS * layout.pp} or "
                f"more: {self.time.bubble / self.time.step:.0%} of a step is bubble"
            )
        room, factor = self.cluster.accelerator.memory_gib, self.calibration and self.calibration.memory
        context = self.job.code.fixed_gib  # not a tensor, so not in what runs measured
        took = (self.memory.total / GIB - context) * (factor or 1.0) + context
        if self.fits and took > room:
            found.append(
                f"runs on this accelerator took x{factor:.3g} of the planned memory; by that it does not fit: "
                f"{took:.3g} GiB of {room:.3g}"
            )
        return tuple(found)

    @cached_property
    def ramp(self) -> RampPlan:
        """Where a batch ramp in this layout should start, and what it costs."""
        return plan_ramp(self.job, self.arrangement, self.tokens, own=self.batch, share=self.share)

    def explain(self, asked: str) -> Explanation:
        """Compare the choice with the best layout that has, say, ``tp=4``; see
        :func:`leaven.planning.explain.explain`."""
        return explain(self.exploration, self.chosen, asked)

    def cost(self, price: Price | None = None) -> CostRow:
        """Time, GPU-hours and energy; also money if the price of a GPU-hour is given."""
        return cost(self.seconds, self.cluster, price)

    def document(self, asked: str | None = None, price: Price | None = None) -> PlanDocument:
        """The document of ``leaven plan``. ``asked``: the layout to explain."""
        times = self.calibration
        return PlanDocument(
            cluster=str(self.cluster),
            gpus=self.cluster.gpus,
            layout=self.arrangement.to_json(),
            memory=MemoryPlan(
                gib=self.memory.total / GIB,
                capacity_gib=self.cluster.accelerator.memory_gib,
                fits=self.fits,
                parts=self.memory.parts_gib,
                activations={name: size / GIB for name, size in self.activations.items()},
                states=self.states,
            ),
            speed=self.speed,
            time=vars(self.time),
            days=self.days,
            gpu_hours=self.gpu_hours,
            flops_convention=CONVENTION,
            alternatives=[_row(other) for other in self.alternatives],
            cost=self.cost(price),
            stages=[StageMemory(gib=memory.total / GIB, parts=memory.parts_gib) for memory in self.stages],
            pareto=[_row(candidate) for candidate in self.pareto],
            untrained=self.untrained and _row(self.untrained),
            ramp=self.ramp,
            **{"not": list(self.not_lines)},
            cautions=list(self.cautions),
            calibration=times
            and CalibrationRow(
                **vars(times),
                uncalibrated_step_seconds=replace(self.job, slower=1.0).time(self.arrangement).step,
                says=str(times),
            ),
            explain=None if asked is None else self.explain(asked),
            next=[],
        )


def _row(candidate: LayoutCandidate) -> CandidateRow:
    return CandidateRow(
        layout=candidate.arrangement.to_json(),
        gib=candidate.memory.total / GIB,
        step_seconds=candidate.time.step,
    )


def plan_recipe(recipe: "Recipe", gpus: str, layout: str | None = None, moments: Moments = "adam") -> ClusterPlan:
    """Plan a recipe on a cluster such as ``64xH100-80GB``, in the best layout or in the given one.

    ``layout`` is written as ``tp=8,pp=12,zero=1,mbs=2``. Blocks are compiled if the recipe's own layout compiles
    them, unless ``layout`` says otherwise. ``moments`` of an optimizer other than Adam can be planned but not
    trained.

    Raises:
        InputError: as :func:`plan_job` and :func:`in_precision`.
    """
    cluster, code = in_precision(parse_cluster(gpus), recipe.precision.compute)
    compiled = recipe.layout.compile
    asked, micro_batch = (
        parse_layout(layout, cluster.gpus, recipe.model, compile=compiled) if layout else (None, None)
    )
    if micro_batch is None and recipe.batch.micro_batch != "auto":
        micro_batch = recipe.batch.micro_batch
    job = Job(
        recipe.model,
        recipe.batch.tokens,
        cluster,
        micro_batch,
        smallest_tokens=min(tokens for _, tokens in recipe.batch.sizes),
        code=code.with_moments(moments),
        compile=asked.compile if asked else compiled,
    )
    return plan_job(job, recipe.data.tokens, asked, recipe.batch)


def plan_run(id: str, gpus: str, layout: str | None = None, moments: Moments = "adam") -> ClusterPlan:
    """Plan a published run by its id, of any architecture, as Megatron with flash attention would train it.

    Sequence length, batch and tokens are the run's own; the vocabulary is padded to a multiple of 128. Limits of
    leaven's own trainer do not apply.

    Raises:
        InputError: if there is no such run, or too little of it is published to plan it.
    """
    from leaven.catalogue.runs import find_run  # a recipe is planned without the catalogue
    from leaven.planning.published import published_blueprint

    run = find_run(id)
    seq_len = run.data.seq_len if run.data else None
    known = {"sequence length": seq_len, "batch": run.batch_tokens, "number of tokens": run.tokens}
    missing = [name for name, value in known.items() if value is None]
    if seq_len is None or run.batch_tokens is None or run.tokens is None:
        raise InputError(f"{id}: no {' and no '.join(missing)} is published; plan a recipe: leaven new --from {id}")
    model = published_blueprint(run.arch, seq_len)
    model = replace(model, vocab_size=-(-model.vocab_size // 128) * 128)
    cluster = parse_cluster(gpus)
    asked, micro_batch = parse_layout(layout, cluster.gpus, model) if layout else (None, None)
    job = Job(
        model,
        _sequences(run.batch_tokens, seq_len) * seq_len,
        cluster,
        micro_batch,
        code=TRAINING_CODES["megatron-flash"].with_moments(moments),
        by_leaven=False,
        compile=asked is not None and asked.compile,
    )
    return plan_job(job, run.tokens, asked)


def _sequences(batch_tokens: int, seq_len: int) -> int:
    """Return the number of sequences of a batch that was published as a rounded number of tokens.

    It is the roundest count within 5%: 16M tokens in sequences of 8,192 are 2,048.
    """
    count = batch_tokens / seq_len
    if count == int(count):
        return int(count)
    units = [2**n for n in range(20, -1, -1)]
    near = [round(count / unit) * unit for unit in units]
    return next((sequences for sequences in near if abs(sequences / count - 1) <= 0.05), max(round(count), 1))


def plan(
    model: Model,
    tokens: int,
    batch_tokens: int,
    cluster: Cluster,
    layout: Layout | None = None,
    *,
    micro_batch: int | None = None,
    smallest_tokens: int | None = None,
    code: TrainingCode = LEAVEN_BF16,
) -> ClusterPlan:
    """Plan a run of ``tokens`` tokens in batches of ``batch_tokens``.

    ``smallest_tokens`` is the first batch, if the batch grows.

    Raises:
        InputError: as :func:`plan_job`.
    """
    compiled = layout is not None and layout.compile
    job = Job(model, batch_tokens, cluster, micro_batch, smallest_tokens, code, compile=compiled)
    return plan_job(job, tokens, layout)


def plan_job(job: Job, tokens: int, layout: Layout | None = None, batch: Batch | None = None) -> ClusterPlan:
    """Plan a job of ``tokens`` tokens. ``batch`` is given if it grows.

    Without a layout the fastest that fits is chosen. A given layout is planned with its fastest micro-batch that
    fits, even if none does; then ``fits`` is False.

    Raises:
        InputError: if a layout, batch or cluster is impossible, or nothing fits; says what would work.
    """
    batch = batch or Batch(tokens=job.batch_tokens)
    if layout is None:
        seen = explore(job)
        if not seen.layouts:
            raise no_layout(seen)
        found = ClusterPlan(job, tokens, batch, seen.layouts[0])
        vars(found)["exploration"] = seen  # reuse the search
        return found
    check_layout(job.model, layout, job.cluster)
    tried = [evaluate(job.model, how, job.cluster, job.code) for how in job.arrangements(layout)]
    fitting = [candidate for candidate in tried if candidate.fits(job.cluster)]
    # If nothing fits, show the one that needs the least memory.
    chosen = ranked(job.model, fitting)[0] if fitting else min(tried, key=lambda candidate: candidate.memory.total)
    return ClusterPlan(job, tokens, batch, chosen)
