"""Documents of ``leaven plan``, ``leaven new`` and ``leaven bench``."""

from typing import Any

from pydantic import Field

from leaven.documents import Document, Entry, Number

Layout = dict[str, Any]
"""The keys of a recipe's [layout], micro_batch and grad_accumulation."""


class StateRow(Entry):
    name: str
    bytes_each: Number  # of one parameter
    bytes: Number  # of all of them
    why: str


class MemoryPlan(Entry):
    gib: float  # of the rank that needs most
    capacity_gib: float  # of one GPU
    fits: bool
    parts: dict[str, float]  # GiB
    activations: dict[str, float]  # GiB by operator
    states: list[StateRow]  # what the whole model keeps between steps


class SpeedPlan(Entry):
    tflops_per_gpu: float
    mfu: float  # full attention matrix counted, as PaLM, Llama and MPT report it
    mfu_causal: float  # causal half of the attention matrix counted
    hfu: float  # full attention matrix and recomputation counted
    step_seconds: float
    tokens_per_second: float  # of the cluster


class CandidateRow(Entry):
    layout: Layout
    gib: float
    step_seconds: float


class Price(Entry):
    amount: float
    currency: str = ""  # as it was typed


class CostRow(Entry):
    days: float
    device: str  # what is paid by the hour: GPU, or process on a CPU
    gpu_hours: float
    energy_kwh: float | None  # at the boards' rated power; null where that is unknown
    board_power_w: float | None  # of one GPU
    pue: float  # power of the building over that of the boards
    price_per_gpu_hour: Price | None
    money: float | None


class StageMemory(Entry):
    gib: float
    parts: dict[str, float]  # GiB


class RampPoint(Entry):
    global_batch: int  # sequences
    batch_tokens: int
    micro_batch: int  # sequences
    grad_accumulation: int
    step_seconds: float
    tokens_per_second: float
    tflops_per_gpu: float
    share: float  # of the full batch's throughput
    filled: bool  # every stage of the pipeline has a micro-batch; leaven does not train without


class RampChoice(Entry):
    start_tokens: int  # the first batch
    increment_tokens: int | None
    over_tokens: int  # length of the ramp
    share: float  # of the full batch's throughput, at the start
    hours: float  # for the tokens of the ramp
    extra_hours: float  # how much longer than at the full batch
    steps: int  # of the optimizer, in the ramp
    full_steps: int  # of the full batch for as many tokens


class RampMicroBatch(Entry):
    from_batch_tokens: int
    micro_batch: int  # sequences


class RampPlan(Entry):
    """Where a batch ramp should start, and what each start costs."""

    share: float  # of the full throughput that the start must keep
    start: RampPoint  # the smallest batch that keeps this share
    increment_tokens: int
    micro_batches: list[RampMicroBatch]  # from the start on
    points: list[RampPoint]  # from the smallest batch to the full one
    choices: list[RampChoice]
    own: RampChoice | None  # the recipe's ramp

    @property
    def chosen(self) -> RampChoice:
        """The choice that starts at ``start``."""
        return next(choice for choice in self.choices if choice.start_tokens == self.start.batch_tokens)


class Comparison(Entry):
    asked: float
    chosen: float


class Explanation(Entry):
    asked: str  # as it was typed
    line: str  # why it is not the choice
    possible: bool
    fits: bool
    layout: Layout | None  # the best that has what was asked for; if none fits, the one that needs least
    step_seconds: float | None
    seconds: dict[str, Comparison]  # of a step, by part
    gib: dict[str, Comparison]  # of memory, by part


class CalibrationRow(Entry):
    time: float  # factor on the time of a step
    memory: float | None  # factor on memory; null if it was not measured
    runs: int
    low: float  # smallest factor of a run in time
    high: float  # largest
    measurement: bool  # it is from --measure
    uncalibrated_step_seconds: float
    says: str


class PlanDocument(Document, schema="plan/1"):
    """``leaven plan RECIPE --gpus CLUSTER``."""

    cluster: str
    gpus: int
    layout: Layout
    memory: MemoryPlan
    speed: SpeedPlan  # at the full batch
    time: dict[str, float]  # seconds of a step, by part
    days: float
    gpu_hours: float
    flops_convention: str
    alternatives: list[CandidateRow]  # the next best layouts that fit
    cost: CostRow
    stages: list[StageMemory]  # by rank of the pipeline
    pareto: list[CandidateRow]  # no other layout beats these in both time and memory
    untrained: CandidateRow | None  # a faster layout that leaven can plan and export but not train
    ramp: RampPlan
    not_: list[str] = Field(alias="not")  # why no neighbouring layout
    cautions: list[str]
    calibration: CalibrationRow | None  # from runs or a measurement; it is in every time
    explain: Explanation | None = None  # with --explain
    next: list[str]  # commands


class FittingSize(Entry):
    law: str
    params: float
    tokens: float
    tokens_per_param: float
    flops: float
    days: float
    mfu: float
    tflops_per_gpu: float
    batch_tokens: int
    shape: dict[str, Any]  # a recipe's [model], and params
    layout: Layout | None  # null with --mfu


class RefusedRow(Entry):
    law: str
    why: str


class BudgetDocument(Document, schema="budget/1"):
    """``leaven plan --budget CLUSTERxTIME``."""

    cluster: str
    nodes: str  # 8 nodes of 8
    gpus: int
    note: str  # about the accelerator
    days: float
    cost: CostRow
    flops_convention: str
    rows: list[FittingSize]  # from the largest model to the smallest
    refused: list[RefusedRow]  # laws by which nothing fits
    next: list[str]  # commands


class DerivationRow(Entry):
    step: int
    title: str
    values: dict[str, Any]  # of the recipe, by path
    lines: list[str]  # the reason, line by line
    reason: str  # the same in one line
    sources: list[str]  # runs and laws


class ProxyRow(Entry):
    params: int
    tokens: int
    batch_tokens: int
    trials: int
    cost: float  # of all trials, as a share of the run
    evidence: str


class ComparedRow(Entry):
    what: str
    path: str
    value: float
    low: float  # of similar published runs
    high: float
    factor: float  # by which the value is outside the range; 1 inside
    outside: bool  # by more than published values are exact


class NewRecipe(Document, schema="new/1"):
    """``leaven new OUT.toml --params --tokens``."""

    path: str
    proxy_path: str | None
    params: int
    tokens: int
    steps: list[DerivationRow]
    proxy: ProxyRow | None
    tuning: str  # cost of tuning, and whether it is worth it
    compared: list[ComparedRow]
    next: list[str]  # commands


class AdoptedRecipe(Document, schema="new-from-weights/1"):
    """``leaven new OUT.toml --from-weights DIR``."""

    path: str
    architecture: str
    params: int
    tokens: int


class NoiseFitRow(Entry):
    points: int
    from_tokens: int
    to_tokens: int
    last: float  # tokens, at to_tokens
    exponent: float  # of the tokens
    scatter: float  # factor by which a typical point is off


class RampDocument(Document, schema="ramp/1"):
    """``leaven bench RECIPE --noise-from RUN``."""

    noise: NoiseFitRow
    multiple: float  # noise scales that a batch may have
    stages: list[dict[str, int]]  # tokens of the batch, from_tokens
    set: list[str]  # arguments of --set; empty if there is nothing to change
    steps: int
    full_steps: int  # without a ramp
    why: str
    next: list[str]  # commands


class BenchSpeed(Entry):
    micro_batch: int  # sequences
    global_batch: int  # sequences
    tokens_per_second: float
    tflops: float
    mfu: float
    peak_gib: float  # on a CPU: of the whole process
    mfu_causal: float
    hfu: float


class RampStart(Entry):
    global_batch: int  # sequences
    batch_tokens: int
    micro_batch: int
    share_of_peak: float


class BenchChoice(Entry):
    micro_batch: int  # the fastest at the largest batch
    share: float
    ramp_start: RampStart  # the smallest batch with that share of full speed


class BenchDocument(Document, schema="bench/1"):
    """``leaven bench RECIPE``."""

    rows: list[BenchSpeed]
    choose: BenchChoice | None  # null if no batch was measured with all its micro-batches
    too_large: list[int]  # micro-batches that do not fit
    whole: bool  # false if a stop or --seconds left out batches
    unfinished: int | None  # the batch that was interrupted
    mfu_convention: str
    next: list[str] = []  # commands
