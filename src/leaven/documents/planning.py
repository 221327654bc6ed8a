"""Define the documents of ``leaven plan``, ``leaven new`` and ``leaven bench``."""

from typing import Any

from pydantic import Field

from leaven.documents import Document, Entry, Number

Layout = dict[str, Any]
"""The keys of a recipe's [layout], micro_batch and grad_accumulation."""


class StateRow(Entry):
    name: str
    bytes_each: Number  # bytes per parameter
    bytes: Number  # bytes of all parameters
    why: str  # what it is for


class MemoryPlan(Entry):
    gib: float  # memory of the rank that needs the most
    capacity_gib: float  # memory of one GPU
    fits: bool
    parts: dict[str, float]  # GiB by part
    activations: dict[str, float]  # GiB by operator
    states: list[StateRow]  # what the whole model stores between steps


class SpeedPlan(Entry):
    tflops_per_gpu: float
    mfu: float  # counts the full attention matrix, as PaLM, Llama and MPT report it
    mfu_causal: float  # counts the causal half of the attention matrix
    hfu: float  # counts the full attention matrix and recomputation
    step_seconds: float
    tokens_per_second: float  # of the whole cluster


class CandidateRow(Entry):
    layout: Layout
    gib: float
    step_seconds: float


class Price(Entry):
    amount: float
    currency: str = ""  # as the user typed it


class CostRow(Entry):
    days: float
    device: str  # what is paid by the hour: GPU, or process on a CPU
    gpu_hours: float
    energy_kwh: float | None  # at the rated power of the boards; null if it is not known
    board_power_w: float | None  # power of one GPU's board
    pue: float  # power of the building / power of the boards
    price_per_gpu_hour: Price | None
    money: float | None


class StageMemory(Entry):
    gib: float
    parts: dict[str, float]  # GiB by part


class RampPoint(Entry):
    global_batch: int  # sequences
    batch_tokens: int
    micro_batch: int  # sequences
    grad_accumulation: int
    step_seconds: float
    tokens_per_second: float
    tflops_per_gpu: float
    share: float  # share of the full batch's throughput
    filled: bool  # whether every pipeline stage has a micro-batch; leaven cannot train if not


class RampChoice(Entry):
    start_tokens: int  # first batch
    increment_tokens: int | None
    over_tokens: int  # length of the ramp
    share: float  # share of the full batch's throughput at the start
    hours: float  # duration of the ramp
    extra_hours: float  # hours more than for the same tokens at the full batch
    steps: int  # optimizer steps in the ramp
    full_steps: int  # optimizer steps for as many tokens at the full batch


class RampMicroBatch(Entry):
    from_batch_tokens: int  # smallest batch with this micro-batch
    micro_batch: int  # sequences


class RampPlan(Entry):
    """The plan of a batch ramp: where it should start, and what each start costs."""

    share: float  # share of the full throughput that the start must keep
    start: RampPoint  # the smallest batch that keeps this share
    increment_tokens: int
    micro_batches: list[RampMicroBatch]  # for batches from the start on
    points: list[RampPoint]  # from the smallest batch to the full one
    choices: list[RampChoice]
    own: RampChoice | None  # the recipe's own ramp

    @property
    def chosen(self) -> RampChoice:
        """The entry of ``choices`` for the recommended start."""
        return next(choice for choice in self.choices if choice.start_tokens == self.start.batch_tokens)


class Comparison(Entry):
    asked: float  # value of the requested layout
    chosen: float  # value of the chosen layout


class Explanation(Entry):
    asked: str  # the request as the user typed it
    line: str  # why it was not chosen
    possible: bool  # whether such a layout exists
    fits: bool  # whether such a layout fits
    layout: Layout | None  # the best layout with the requested values; if none fits, the one with the least memory
    step_seconds: float | None
    seconds: dict[str, Comparison]  # seconds of a step by part
    gib: dict[str, Comparison]  # memory by part


class CalibrationRow(Entry):
    time: float  # factor on the time of a step
    memory: float | None  # factor on memory; null if it was not measured
    runs: int  # number of runs
    low: float  # smallest time factor of a run
    high: float  # largest time factor of a run
    measurement: bool  # whether it is from --measure
    uncalibrated_step_seconds: float
    says: str  # the calibration in words


class PlanDocument(Document, schema="plan/1"):
    """The result of ``leaven plan RECIPE --gpus CLUSTER``."""

    cluster: str
    gpus: int
    layout: Layout
    memory: MemoryPlan
    speed: SpeedPlan  # at the full batch
    time: dict[str, float]  # seconds of a step by part
    days: float
    gpu_hours: float
    flops_convention: str
    alternatives: list[CandidateRow]  # the next best layouts that fit
    cost: CostRow
    stages: list[StageMemory]  # memory by pipeline rank
    pareto: list[CandidateRow]  # no other layout beats these in both time and memory
    untrained: CandidateRow | None  # a faster layout that leaven can plan and export but not train
    ramp: RampPlan
    not_: list[str] = Field(alias="not")  # why neighbouring layouts were not chosen
    cautions: list[str]
    calibration: CalibrationRow | None  # from runs or a measurement; all times include it
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
    shape: dict[str, Any]  # [model] of a recipe, and params
    layout: Layout | None  # the fastest layout; null with --mfu


class RefusedRow(Entry):
    law: str
    why: str  # why no size fits


class BudgetDocument(Document, schema="budget/1"):
    """The result of ``leaven plan --budget CLUSTERxTIME``."""

    cluster: str
    nodes: str  # e.g. 8 nodes of 8
    gpus: int
    note: str  # about the accelerator
    days: float
    cost: CostRow
    flops_convention: str
    rows: list[FittingSize]  # from the largest model to the smallest
    refused: list[RefusedRow]  # laws for which nothing fits
    next: list[str]  # commands


class DerivationRow(Entry):
    step: int
    title: str
    values: dict[str, Any]  # values of the recipe by path
    lines: list[str]  # the reason, line by line
    reason: str  # the reason in one line
    sources: list[str]  # published runs and laws


class ProxyRow(Entry):
    params: int
    tokens: int
    batch_tokens: int
    trials: int  # number of trials
    cost: float  # cost of all trials as a share of the run
    evidence: str  # what is known about tuning on proxies of this size


class ComparedRow(Entry):
    what: str  # the compared value in words
    path: str  # path of the value in the recipe
    value: float
    low: float  # lowest value of similar published runs
    high: float  # highest value of similar published runs
    factor: float  # factor by which the value is outside this range; 1 if it is inside
    outside: bool  # whether the factor is larger than rounding explains


class TimeFit(Entry):
    cluster: str
    seconds: float  # planned training time
    text_tokens: int | None  # tokens of the text, if it is too short for the given time; null if the time is used


class NewRecipe(Document, schema="new/1"):
    """The result of ``leaven new OUT.toml`` for a new model."""

    path: str
    proxy_path: str | None
    params: int
    tokens: int
    steps: list[DerivationRow]  # how the recipe was derived
    proxy: ProxyRow | None
    tuning: str  # cost of tuning, and whether it is worth it
    compared: list[ComparedRow]  # values compared with published runs
    fit: TimeFit | None = None  # with --time
    next: list[str]  # commands


class AdoptedRecipe(Document, schema="new-from-weights/1"):
    """The result of ``leaven new OUT.toml --from-weights DIR``."""

    path: str
    architecture: str
    params: int
    tokens: int
    next: list[str]  # commands


class NoiseFitRow(Entry):
    points: int  # number of measurements
    from_tokens: int  # tokens of the first measurement
    to_tokens: int  # tokens of the last measurement
    last: float  # noise scale at to_tokens, in tokens
    exponent: float  # exponent of the tokens in the power law
    scatter: float  # factor by which a typical measurement is off the power law


class RampDocument(Document, schema="ramp/1"):
    """The result of ``leaven bench RECIPE --noise-from RUN``: a batch ramp from the measured noise scale."""

    noise: NoiseFitRow
    multiple: float  # largest batch in noise scales
    stages: list[dict[str, int]]  # from_tokens, and tokens of the batch
    set: list[str]  # arguments of --set; empty if there is nothing to change
    steps: int  # optimizer steps with this ramp
    full_steps: int  # optimizer steps without a ramp
    why: str  # why this ramp, or why none
    next: list[str]  # commands


class BenchSpeed(Entry):
    micro_batch: int  # sequences
    global_batch: int  # sequences
    tokens_per_second: float
    tflops: float
    mfu: float
    peak_gib: float  # peak memory; on a CPU that of the whole process
    mfu_causal: float
    hfu: float


class RampStart(Entry):
    global_batch: int  # sequences
    batch_tokens: int
    micro_batch: int
    share_of_peak: float  # throughput / highest throughput


class BenchChoice(Entry):
    micro_batch: int  # the fastest micro-batch at the largest batch
    share: float  # share of full speed that a ramp must keep
    ramp_start: RampStart  # the smallest batch that keeps this share


class BenchDocument(Document, schema="bench/1"):
    """The result of ``leaven bench RECIPE``: measured speeds."""

    rows: list[BenchSpeed]
    choose: BenchChoice | None  # null if no batch was measured with all its micro-batches
    too_large: list[int]  # micro-batches that do not fit
    whole: bool  # false if the user or --seconds stopped it before all batches
    unfinished: int | None  # the batch during which it stopped
    mfu_convention: str
    next: list[str] = []  # commands
