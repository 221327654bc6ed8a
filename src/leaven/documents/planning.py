"""Define the documents of ``leaven plan``, ``leaven new`` and ``leaven bench``."""

from typing import Any

from pydantic import Field

from leaven.documents import Document, Entry, Number

Layout = dict[str, Any]
"""The keys of [layout] in a recipe, with micro_batch and grad_accumulation."""


class StateRow(Entry):
    """A tensor that training keeps for every parameter, such as the optimizer's first moment."""

    name: str
    bytes_each: Number  # bytes per parameter
    bytes: Number  # bytes for all parameters
    why: str  # purpose of the tensor


class MemoryPlan(Entry):
    gib: float  # memory of the rank that needs the most
    capacity_gib: float  # memory of one GPU
    fits: bool
    parts: dict[str, float]  # GiB by part
    activations: dict[str, float]  # GiB by operator
    states: list[StateRow]  # the tensors that the whole model keeps between steps


class SpeedPlan(Entry):
    tflops_per_gpu: float
    mfu: float  # counts the full attention matrix, as PaLM, Llama and MPT report it
    mfu_causal: float  # counts the causal half of the attention matrix
    hfu: float  # counts the full attention matrix and recomputation
    step_seconds: float
    tokens_per_second: float  # speed of the whole cluster


class CandidateRow(Entry):
    """A layout with its memory and speed."""

    layout: Layout
    gib: float  # memory of the rank that needs the most
    step_seconds: float

    @property
    def trained(self) -> bool:
        """Whether leaven can train the layout; it can only plan and export context and expert parallelism."""
        return bool(self.layout["cp"] == self.layout["ep"] == 1)


class Price(Entry):
    amount: float
    currency: str = ""  # as the user typed it


class CostRow(Entry):
    days: float
    device: str  # unit that is paid by the hour: GPU, or process on a CPU
    gpu_hours: float
    energy_kwh: float | None  # energy at the rated power of the boards; null if the power is not known
    board_power_w: float | None  # power of one GPU's board
    pue: float  # power of the building / power of the boards
    price_per_gpu_hour: Price | None
    money: float | None


class StageMemory(Entry):
    """The memory of a pipeline rank."""

    gib: float
    parts: dict[str, float]  # GiB by part


class RampPoint(Entry):
    """The planned speed at one batch size of a batch ramp."""

    global_batch: int  # sequences
    batch_tokens: int
    micro_batch: int  # sequences
    grad_accumulation: int
    step_seconds: float
    tokens_per_second: float
    tflops_per_gpu: float
    share: float  # throughput / throughput of the full batch
    filled: bool  # whether there are enough micro-batches for all pipeline stages; if not, leaven cannot train


class RampChoice(Entry):
    """A batch ramp that begins at one batch size, and its cost."""

    start_tokens: int  # first batch size
    increment_tokens: int | None  # growth of the batch size at a time
    over_tokens: int  # length of the ramp
    share: float  # throughput at the start / throughput of the full batch
    hours: float  # duration of the ramp
    extra_hours: float  # hours minus the duration of the same tokens at the full batch
    steps: int  # optimizer steps in the ramp
    full_steps: int  # optimizer steps for the same tokens at the full batch


class RampMicroBatch(Entry):
    from_batch_tokens: int  # the smallest batch size with this micro-batch
    micro_batch: int  # sequences


class RampPlan(Entry):
    """The plan of a batch ramp: the recommended first batch size, and the cost of other first batch sizes."""

    share: float  # lowest acceptable throughput at the start, as a share of the full batch's throughput
    start: RampPoint  # the smallest batch size with an acceptable throughput
    increment_tokens: int  # growth of the batch size at a time
    micro_batches: list[RampMicroBatch]  # micro-batch by batch size, beginning with the start
    points: list[RampPoint]  # from the smallest batch size to the full batch
    choices: list[RampChoice]  # ramps with different first batch sizes
    own: RampChoice | None  # the ramp in the recipe

    @property
    def chosen(self) -> RampChoice:
        """The entry of ``choices`` that begins at ``start``."""
        return next(choice for choice in self.choices if choice.start_tokens == self.start.batch_tokens)


class Comparison(Entry):
    asked: float  # value of the requested layout
    chosen: float  # value of the chosen layout


class Explanation(Entry):
    """Why a layout that the user asked about was not chosen."""

    asked: str  # the requested values as the user typed them
    line: str  # why the layout was not chosen
    possible: bool  # whether a layout with the requested values exists
    fits: bool  # whether a layout with the requested values fits in memory
    layout: Layout | None  # the fastest such layout; if none fits, the layout with the least memory
    step_seconds: float | None
    seconds: dict[str, Comparison]  # seconds of a step by part
    gib: dict[str, Comparison]  # memory by part


class CalibrationRow(Entry):
    """Factors from measured runs by which the predicted time and memory are multiplied."""

    time: float  # factor on the time of a step
    memory: float | None  # factor on memory; null if memory was not measured
    runs: int  # number of measured runs
    low: float  # smallest time factor of a run
    high: float  # largest time factor of a run
    measurement: bool  # whether the factors are from --measure
    uncalibrated_step_seconds: float
    says: str  # the calibration in words


class PlanDocument(Document, schema="plan/1"):
    """The result of ``leaven plan RECIPE --gpus CLUSTER``."""

    cluster: str
    gpus: int
    layout: Layout
    memory: MemoryPlan
    speed: SpeedPlan  # speed at the full batch
    time: dict[str, float]  # seconds of a step by part
    days: float
    gpu_hours: float
    flops_convention: str
    alternatives: list[CandidateRow]  # the next best layouts that fit
    cost: CostRow
    stages: list[StageMemory]  # memory by pipeline rank
    pareto: list[CandidateRow]  # layouts that no other layout beats in both time and memory
    untrained: CandidateRow | None  # a faster layout that leaven can plan and export but not train
    ramp: RampPlan
    not_: list[str] = Field(alias="not")  # why neighbouring layouts were not chosen
    cautions: list[str]
    calibration: CalibrationRow | None  # all times in this document include the calibration
    explain: Explanation | None = None  # answer to --explain
    next: list[str] = []  # commands to type next


class FittingSize(Entry):
    """A model size that can be trained with a budget."""

    law: str  # scaling law that gives the ratio of tokens to parameters
    params: float
    tokens: float
    tokens_per_param: float
    flops: float
    days: float
    mfu: float
    tflops_per_gpu: float
    batch_tokens: int
    shape: dict[str, Any]  # the keys of [model] in a recipe, and params
    layout: Layout | None  # the fastest layout; null with --mfu


class RefusedRow(Entry):
    law: str
    why: str  # why no size fits


class BudgetDocument(Document, schema="budget/1"):
    """The result of ``leaven plan --budget CLUSTERxTIME``."""

    cluster: str
    nodes: str  # e.g. 8 nodes of 8
    gpus: int
    note: str  # note about the accelerator
    days: float
    cost: CostRow
    flops_convention: str
    rows: list[FittingSize]  # from the largest model to the smallest
    refused: list[RefusedRow]  # laws for which no model size fits
    next: list[str] = []  # commands to type next


class DerivationRow(Entry):
    """A step in the choice of a recipe's values."""

    step: int
    title: str
    values: dict[str, Any]  # values of the recipe by path
    lines: list[str]  # the reason, line by line
    reason: str  # the reason in one line
    sources: list[str]  # published runs and laws


class ProxyRow(Entry):
    """The small proxy model on which a recipe is tuned."""

    params: int
    tokens: int  # of one trial
    batch_tokens: int
    trials: int  # number of trials
    cost: float  # FLOPs of all trials / FLOPs of the recipe's run
    evidence: str  # what is known about tuning on proxies of this size


class ComparedRow(Entry):
    """A value of a new recipe, compared with similar published runs."""

    what: str  # the compared value in words
    path: str  # path of the value in the recipe
    value: float
    low: float  # lowest value of similar published runs
    high: float  # highest value of similar published runs
    factor: float  # factor by which the value is outside this range; 1 if it is inside
    outside: bool  # whether the factor is larger than rounding explains


class TimeFit(Entry):
    """The result of ``leaven new --time``."""

    cluster: str
    seconds: float  # planned training time
    text_tokens: int | None  # tokens of a text that is too short for the given time; null if the text is long enough


class NewRecipe(Document, schema="new/1"):
    """The result of ``leaven new OUT.toml`` for a new model."""

    path: str
    proxy_path: str | None
    params: int
    tokens: int
    steps: list[DerivationRow]  # how the recipe was derived
    proxy: ProxyRow | None
    tuning: str  # cost of tuning, and whether tuning is worth this cost
    compared: list[ComparedRow]  # values compared with published runs
    fit: TimeFit | None = None  # null without --time
    next: list[str] = []  # commands to type next


class AdoptedRecipe(Document, schema="new-from-weights/1"):
    """The result of ``leaven new OUT.toml --from-weights DIR``."""

    path: str
    architecture: str
    params: int
    tokens: int
    next: list[str] = []  # commands to type next


class NoiseFitRow(Entry):
    """A power law of the gradient noise scale over the tokens, fitted to a run."""

    points: int  # number of measurements
    from_tokens: int  # tokens of the first measurement
    to_tokens: int  # tokens of the last measurement
    last: float  # noise scale at to_tokens, in tokens
    exponent: float  # exponent of the tokens
    scatter: float  # factor by which a typical measurement differs from the power law


class RampDocument(Document, schema="ramp/1"):
    """The result of ``leaven bench RECIPE --noise-from RUN``: a batch ramp from the measured noise scale."""

    noise: NoiseFitRow
    multiple: float  # largest allowed batch size / noise scale
    stages: list[dict[str, int]]  # from_tokens: tokens of the run at which the stage begins; tokens: batch size
    set: list[str]  # arguments of --set for the ramp; empty if no ramp is proposed
    steps: int  # optimizer steps with this ramp
    full_steps: int  # optimizer steps without a ramp
    why: str  # why this ramp is proposed, or why no ramp is proposed
    next: list[str] = []  # commands to type next


class BenchSpeed(Entry):
    micro_batch: int  # sequences
    global_batch: int  # sequences
    tokens_per_second: float
    tflops: float
    mfu: float
    peak_gib: float  # peak memory of the GPU, or of the process on a CPU
    mfu_causal: float
    hfu: float


class RampStart(Entry):
    """The recommended first batch size of a batch ramp."""

    global_batch: int  # sequences
    batch_tokens: int
    micro_batch: int
    share_of_peak: float  # throughput / highest throughput


class BenchChoice(Entry):
    micro_batch: int  # the fastest micro-batch at the largest batch
    share: float  # lowest acceptable speed of a ramp, as a share of the full speed
    ramp_start: RampStart  # the smallest batch with an acceptable speed


class BenchDocument(Document, schema="bench/1"):
    """The result of ``leaven bench RECIPE``: measured speeds."""

    rows: list[BenchSpeed]
    choose: BenchChoice | None  # null if no batch was measured with all its micro-batches
    too_large: list[int]  # micro-batches that do not fit
    whole: bool  # false if Ctrl-C or --seconds ended the measurement before all batches were measured
    unfinished: int | None  # the batch of which only some micro-batches were measured
    mfu_convention: str
    next: list[str] = []  # commands to type next
