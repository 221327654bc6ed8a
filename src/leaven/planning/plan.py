"""Plan a run on a cluster: whether it fits, how fast it is and how long it takes."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from leaven.documents.planning import MemoryPlan, PlanDocument, Price, PublishedTimes, SpeedPlan, StageMemory
from leaven.errors import InputError
from leaven.planning.accelerators import Accelerator
from leaven.planning.arrangement import check_layout, parse_layout
from leaven.planning.blueprint import blueprint
from leaven.planning.calibration import CalibrationRecord, calibration
from leaven.planning.cost import cluster_cost
from leaven.planning.explain import any_fits, explain, memory_and_limit, no_layout, not_lines, smallest_change
from leaven.planning.flops import CONVENTION, flops_per_token, utilisation
from leaven.planning.hardware import estimated_gpus, parse_cluster
from leaven.planning.layouts import FILLS, Exploration, Job, LayoutCandidate, explore, ranked, thin_pipeline
from leaven.planning.memory import GIB, activation_parts, mask_bytes, stage_memory
from leaven.planning.ramp import SHARE, RampThroughput, plan_ramp
from leaven.planning.training_codes import Moments, in_precision, states, training_code
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe

N_ALTERNATIVES = 5
_DOUBLINGS = 8  # numbers of GPUs that :func:`cluster_for` tries
_MUCH = 0.2  # a plan warns if the GPU waits for the host in a larger share of a step
_WORTH_COMPILING = 3_600  # seconds of a run; a plan says if compiling would save more
# Result of benchmarks/planner_accuracy.py: mean and worst error over every usable row of published tables.
ACCURACY = (
    "mean error on published runs: time 6% over 46 rows of BLOOM (worst +18%), 8% over 61 rows of MPT "
    "(worst -26%), 23% over 70 rows of MPT on H100 (worst -39%), 9% over 13 rows of nanotron (worst +32%), 9% over "
    "18 rows of torchtitan (worst -21%); memory 3% over 33 rows of BLOOM (worst -13%), 4% over 13 rows of nanotron "
    "(worst -11%), 5% over 18 rows of torchtitan (worst -16%); see docs/evidence/planner-accuracy.md"
)
ACCURACY_OF_EXPERTS = (
    "mean error on published mixtures of experts: time 13% over 6 rows of DeepSeek-V2 (worst -15%), 7% over 6 "
    "rows of DeepSeek-V3 (worst -12%), 15% over 5 rows of Qwen3 (worst -31%); memory 3% over 6 rows of "
    "DeepSeek-V2 (worst -3%), 2% over 6 rows of DeepSeek-V3 (worst -2%); see docs/evidence/planner-accuracy.md"
)


@cache
def published_times(accelerator: str, experts: bool) -> list[PublishedTimes]:
    """Return the step times of published runs on an accelerator, such as ``H100-SXM-80GB``.

    Accelerators are compared by name up to the first hyphen. ``experts`` selects mixtures instead of dense models.
    """
    text = Path(__file__).with_name("published_times.toml").read_text(encoding="utf-8")
    found = [PublishedTimes.model_validate(row) for row in tomllib.loads(text)["times"]]
    return [row for row in found if (row.accelerator, row.experts) == (accelerator.partition("-")[0], experts)]


@dataclass(frozen=True)
class ClusterPlan:
    """The plan of a run on a cluster. Each property is computed when it is first read."""

    job: Job
    tokens: int  # tokens of the whole run
    layout: Layout | None = None  # the user's layout; None to choose the fastest that fits

    def calibrated(self, records: Iterable[CalibrationRecord], compute: str) -> "ClusterPlan":
        """Return the plan with times corrected by ``records`` for its accelerator and ``compute`` dtype."""
        found = calibration(
            records,
            self.job.cluster.accelerator.name,
            self.job.model.params,
            self.chosen.arrangement.layout,
            compute=compute,
            step_seconds=self.chosen.time.step,
        )
        return replace(self, job=replace(self.job, calibration=found)) if found else self

    @cached_property
    def exploration(self) -> Exploration:
        """The result of the search over all layouts, even if the user gave a layout."""
        return explore(self.job)

    @cached_property
    def chosen(self) -> LayoutCandidate:
        """The user's ``layout`` with its best micro-batch size, even if it does not fit, else the fastest that fits.

        Raise InputError if ``layout`` is impossible, or is None and no layout fits.
        """
        if self.layout is None:
            if not self.exploration.layouts:
                raise no_layout(self.exploration)
            return self.exploration.layouts[0]
        check_layout(self.job.model, self.layout, self.job.cluster)
        tried = [LayoutCandidate(self.job, how) for how in self.job.arrangements(self.layout)]
        fitting = [candidate for candidate in tried if candidate.fits]
        return ranked(fitting)[0] if fitting else min(tried, key=lambda candidate: candidate.memory.total)

    @cached_property
    def speed(self) -> SpeedPlan:
        model, cluster, step = self.job.model, self.job.cluster, self.chosen.time.step
        tokens_per_second = self.job.batch.tokens / step
        peak = cluster.accelerator.peak_tflops * 1e12
        done = tokens_per_second / cluster.gpus * flops_per_token(model)
        return SpeedPlan(
            tflops_per_gpu=done / 1e12,
            step_seconds=step,
            tokens_per_second=tokens_per_second,
            **utilisation(model, self.chosen.arrangement.layout.recompute, done / peak),
        )

    @cached_property
    def seconds(self) -> float:
        return RampThroughput(self.job, self.chosen.arrangement).run_seconds(self.job.batch.sizes, self.tokens)

    @cached_property
    def cautions(self) -> tuple[str, ...]:
        chosen, device = self.chosen, self.job.cluster.accelerator
        found = [] if chosen.fits else [memory_and_limit(chosen) + smallest_change(self.exploration, chosen)]
        if any(source.confidence == "guess" for source in device.sources):
            rest = "MFU and energy" if self.job.calibration else "time, MFU and energy; --measure calibrates the time"
            found.append(f"the speed of {device.name} is a guess, and therefore also {rest}")
        if chosen.time.host > _MUCH * chosen.time.step:
            better = "a larger micro-batch" if chosen.arrangement.grad_accumulation > 1 else "a stack of trials"
            better = better if self.job.cluster.gpus == 1 else "fewer GPUs"
            found.append(
                f"the GPU waits for the host in {chosen.time.host / chosen.time.step:.0%} of a step, because the "
                f"kernels of so small a model are short; {better} would keep the GPU busier"
            )
        compiled = chosen.arrangement.layout.model_copy(update={"compile": True})
        step = self.job.time(replace(chosen.arrangement, layout=compiled)).step
        if self.job.by_leaven and self.seconds * (1 - step / chosen.time.step) > _WORTH_COMPILING:
            found.append(
                "not compiled: with layout.compile = true, steps are planned to be up to "
                f"{chosen.time.step / step:.1f} times as fast, because torch.compile fuses the kernels between "
                "matrix products"
            )
        if device.name != "cpu" and mask_bytes(blueprint(self.job.model), chosen.arrangement, 0, self.job.code):
            found.append(
                "the time is optimistic: with isolated documents, ALiBi or windows, torch does not use flash "
                "attention, but the plan assumes its speed"
            )
        if thin_pipeline(chosen.arrangement):
            pp = chosen.arrangement.layout.pp
            found.append(
                f"the pipeline bubble takes {chosen.time.bubble / chosen.time.step:.0%} of a step: with pp = {pp}, a "
                f"step should have {FILLS * pp} or more micro-batches, but has {chosen.arrangement.grad_accumulation}"
            )
        factor = self.job.calibration and self.job.calibration.memory
        if factor and chosen.fits:
            context = self.job.code.fixed_gib  # device context: not in tensors, so runs do not measure it
            took = (chosen.memory.total / GIB - context) * factor + context
            if took > device.memory_gib:
                found.append(
                    f"runs on this accelerator needed {factor:.3g} times the planned memory; with this factor, this "
                    f"run needs {took:.3g} GiB and does not fit into {device.memory_gib:.3g} GiB"
                )
        if not self.job.by_leaven:
            found.append(
                f"planned for the training code {self.job.code.name}; leaven new may choose another layout, because "
                "memory and time differ in leaven's own trainer"
            )
        return tuple(found)

    def document(self, asked: str | None = None, price: Price | None = None, share: float = SHARE) -> PlanDocument:
        """Return the document of ``leaven plan`` without suggested commands. ``asked``: text of ``--explain``."""
        model, code, cluster, chosen = self.job.model, self.job.code, self.job.cluster, self.chosen
        how = chosen.arrangement
        stages = [stage_memory(model, how, rank, code) for rank in range(how.layout.pp)]
        totals = [memory.total for memory in stages]
        activations = activation_parts(model, how, totals.index(max(totals)), code)
        table = blueprint(model)
        matrices = sum(block.matrices for block in table.blocks)
        cost = cluster_cost(cluster, self.seconds, price)
        others = [other for other in self.exploration.layouts if other.arrangement.layout != how.layout]
        untrained = self.exploration.untrained
        return PlanDocument(
            cluster=str(cluster),
            gpus=cluster.gpus,
            params=table.params,
            params_active=table.active_params,
            layout=how.to_json(),
            memory=MemoryPlan(
                gib=chosen.memory.total / GIB,
                capacity_gib=cluster.accelerator.memory_gib,
                fits=chosen.fits,
                parts=chosen.memory.parts_gib,
                activations={name: size / GIB for name, size in activations.items()},
                states=states(table.params, code, matrices),
            ),
            speed=self.speed,
            time=vars(chosen.time),
            days=cost.days,
            gpu_hours=cost.gpu_hours,
            flops_convention=CONVENTION,
            alternatives=[other.row() for other in others[:N_ALTERNATIVES]],
            cost=cost,
            stages=[StageMemory(gib=memory.total / GIB, parts=memory.parts_gib) for memory in stages],
            pareto=[candidate.row() for candidate in self.exploration.pareto],
            untrained=untrained and untrained.row(),
            ramp=plan_ramp(self.job, how, self.tokens, share),
            **{"not": list(not_lines(self.exploration, chosen))},
            cautions=list(self.cautions),
            calibration=self.job.calibration,
            published_times=[]
            if self.job.calibration
            else published_times(cluster.accelerator.name, table.active_params != table.params),
            explain=None if asked is None else explain(self.exploration, chosen, asked),
        )


def plan_recipe(
    recipe: Recipe, gpus: str, layout: str | None = None, moments: Moments | None = None, code: str | None = None
) -> ClusterPlan:
    """Plan a recipe on a cluster such as ``64xH100-80GB``.

    ``layout`` is text such as ``tp=8,pp=12``. Its default is the fastest that fits. ``moments`` is the
    optimizer whose states are counted, by default the recipe's. ``code`` names a training code, by default
    leaven's. Raise InputError as :func:`plan` does, or if a name is unknown or the recipe's dtype cannot be
    planned.
    """
    return plan(_job(recipe, gpus, moments, code), recipe.data.tokens, layout)


def _job(recipe: Recipe, gpus: str, moments: Moments | None = None, other: str | None = None) -> Job:
    named = None if other is None else training_code(other)
    if named and recipe.precision.compute == "fp32":
        raise InputError(
            f"--code {other} can be planned only in 16 bits, but this recipe computes in fp32; "
            "plan with --set precision.compute=bf16"
        )
    cluster, code = in_precision(parse_cluster(gpus), recipe.precision.compute)
    code = named or code
    code = code.with_moments(moments) if moments else code.with_muon(recipe.hyperparameters.ns_steps)
    code = code.averaging(recipe.average is not None).isolating(recipe.data.documents)
    return Job(recipe.model, recipe.batch, cluster, code, compile=recipe.layout.compile, by_leaven=named is None)


def cluster_for(recipe: Recipe, gpu: Accelerator) -> str:
    """Return a cluster of ``gpu`` devices for a recipe, as ``COUNTxNAME``.

    The count is the number of ranks in the recipe's layout, if that is above 1. Otherwise it is the estimate of
    :func:`estimated_gpus`, doubled up to seven times until the recipe fits. If it never fits, return the estimate.
    """
    if recipe.layout.ranks > 1:
        return f"{recipe.layout.ranks}x{gpu.name}"
    least = estimated_gpus(recipe, gpu)
    counts = [least * 2**n for n in range(_DOUBLINGS)]
    return f"{next((n for n in counts if any_fits(_job(recipe, f'{n}x{gpu.name}'))), least)}x{gpu.name}"


def plan(job: Job, tokens: int, layout: str | None = None) -> ClusterPlan:
    """Return the plan of a run over ``tokens`` tokens, by default in the fastest layout that fits.

    ``layout`` is text such as ``tp=8,pp=12,mbs=2``. A given layout may need more memory than there is. Raise
    InputError if the layout or the batch is impossible, or if no layout is given and none fits.
    """
    asked = None
    if layout:
        asked, micro_batch = parse_layout(layout, job.cluster.gpus, compile=job.compile)
        job = replace(job if micro_batch is None else job.with_micro_batch(micro_batch), compile=asked.compile)
    found = ClusterPlan(job, tokens, asked)
    found.chosen  # noqa: B018  computed now to raise its InputError here
    return found
