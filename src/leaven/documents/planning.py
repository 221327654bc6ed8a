"""Documents of ``leaven plan``, ``leaven new`` and ``leaven bench``."""

from typing import Any

from pydantic import Field

from leaven.documents import Document, Entry, Number

Layout = dict[str, Any]
"""The keys of a recipe's [layout], micro_batch and grad_accumulation."""


class StateRow(Entry):
    name: str
    bytes_each: Number
    bytes: Number
    why: str


class MemoryPlan(Entry):
    gib: float  # of the rank that needs most
    fits: bool
    parts: dict[str, float]  # GiB
    activations: dict[str, float]  # GiB by operator
    states: list[StateRow]  # what the whole model keeps between steps


class SpeedPlan(Entry):
    tflops_per_gpu: float
    mfu: float  # full attention matrix counted
    step_seconds: float
    tokens_per_second: float  # of the cluster


class CandidateRow(Entry):
    layout: Layout
    gib: float
    step_seconds: float


class PriceRow(Entry):
    amount: float
    currency: str


class CostRow(Entry):
    days: float
    gpu_hours: float
    energy_kwh: float | None  # at the boards' rated power
    board_power_w: float | None
    pue: float
    price_per_gpu_hour: PriceRow | None
    money: float | None


class StageMemory(Entry):
    gib: float
    parts: dict[str, float]  # GiB


class PlanDocument(Document, schema="plan/1"):
    """``leaven plan RECIPE --gpus CLUSTER``."""

    layout: Layout
    memory: MemoryPlan
    speed: SpeedPlan  # at the full batch
    days: float
    gpu_hours: float
    flops_convention: str
    alternatives: list[CandidateRow]  # the next best layouts that fit
    cost: CostRow
    stages: list[StageMemory]  # by rank of the pipeline
    pareto: list[CandidateRow]  # no other beats these in time and in memory
    untrained: CandidateRow | None  # a faster layout that leaven plans and exports but does not train
    ramp: dict[str, Any]  # where a batch ramp should start: share, start, increment_tokens, points, choices, own
    not_: list[str] = Field(alias="not")  # why no neighbouring layout
    cautions: list[str]
    calibration: dict[str, Any] | None  # the factor of runs or a measurement that is in every time
    explain: dict[str, Any] | None = None  # with --explain: why not so
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
    gpus: int
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
    reason: str
    sources: list[str]


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
    value: float | None
    low: float | None  # of similar published runs
    high: float | None
    outside: bool


class NewRecipe(Document, schema="new/1"):
    """``leaven new OUT.toml --params --tokens``."""

    path: str
    proxy_path: str | None
    params: int
    tokens: int
    steps: list[DerivationRow]
    proxy: ProxyRow | None
    tuning: str  # what tuning costs, and whether it is worth it
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
    scatter: float  # the factor by which a typical point is off


class RampDocument(Document, schema="ramp/1"):
    """``leaven bench RECIPE --noise-from RUN``."""

    noise: NoiseFitRow
    multiple: float  # noise scales that a batch may have
    stages: list[dict[str, int]]  # tokens of the batch, from_tokens
    set: list[str]  # what --set takes; empty if there is nothing to change
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
    peak_gib: float  # on a CPU of the whole process
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
    choose: BenchChoice | None  # null where no batch was measured with all its micro-batches
    too_large: list[int]  # micro-batches that do not fit
    whole: bool  # False if a stop or --seconds left batches out
    unfinished: int | None  # the batch that was being measured then
    mfu_convention: str
    next: list[str]  # commands
