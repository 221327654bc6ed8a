"""Documents of ``leaven plan``, ``leaven new`` and ``leaven bench``."""

from typing import Any

from pydantic import Field

from leaven.documents import Document, Entry, Number

Layout = dict[str, Any]
"""The keys of [layout] in a recipe, and also micro_batch and grad_accumulation."""


class StateRow(Entry):
    """A kind of tensor that training stores for parameters, such as gradients or Adam's moments."""

    name: str
    bytes_each: Number  # bytes for each parameter that has such a tensor
    bytes: Number  # bytes for all parameters together
    why: str  # purpose of the tensor


class MemoryPlan(Entry):
    gib: float  # memory of the rank that needs the most
    capacity_gib: float  # memory of one GPU
    fits: bool
    parts: dict[str, float]  # memory in GiB by part, e.g. weights
    activations: dict[str, float]  # memory of the activations in GiB by operator
    states: list[StateRow]  # weights, gradients and optimizer states of the whole model


class SpeedPlan(Entry):
    tflops_per_gpu: float
    mfu: float  # model FLOPs utilisation with the full attention matrix, as in the papers on PaLM, Llama and MPT
    mfu_causal: float  # model FLOPs utilisation with the causal half of the attention matrix
    hfu: float  # hardware FLOPs utilisation: like mfu, but also counts recomputation
    step_seconds: float
    tokens_per_second: float  # speed of the whole cluster


class CandidateRow(Entry):
    """A layout with its memory and speed."""

    layout: Layout
    gib: float  # memory of the rank that needs the most
    step_seconds: float

    @property
    def trained(self) -> bool:
        """Whether leaven can train with the layout, not only plan and export it."""
        return bool(self.layout["cp"] == 1)


class Price(Entry):
    amount: float
    currency: str = ""  # the currency as the user typed it


class CostRow(Entry):
    days: float
    device: str  # unit that is paid by the hour: GPU, or process on a CPU
    gpu_hours: float
    energy_kwh: float | None  # gpu_hours x board_power_w x pue / 1000; null if the power is not known
    board_power_w: float | None  # rated power of the board of one GPU
    pue: float  # power of the building / power of the boards
    price_per_gpu_hour: Price | None
    money: float | None


class StageMemory(Entry):
    """The memory that a pipeline rank needs."""

    gib: float
    parts: dict[str, float]  # memory in GiB by part, e.g. weights


class RampPoint(Entry):
    """The planned speed at one batch size of a batch ramp."""

    global_batch: int  # batch size in sequences
    batch_tokens: int
    micro_batch: int  # micro-batch size in sequences
    grad_accumulation: int
    step_seconds: float
    tokens_per_second: float
    tflops_per_gpu: float
    share: float  # throughput at this batch size / throughput at the full batch size
    filled: bool  # whether there are enough micro-batches for the pipeline; without them, leaven cannot train


class RampChoice(Entry):
    """A batch ramp (a growing batch size at the start of a run), and its cost."""

    start_tokens: int  # first batch size in tokens
    increment_tokens: int | None  # tokens by which the batch grows each time; null if batch.stages lists the sizes
    over_tokens: int  # length of the ramp in tokens
    share: float  # throughput at the first batch size / throughput at the full batch size
    hours: float  # time that the ramp takes
    extra_hours: float  # hours minus the time that the same tokens take at the full batch size
    steps: int  # optimizer steps in the ramp
    full_steps: int  # optimizer steps for the same tokens at the full batch size


class RampMicroBatch(Entry):
    from_batch_tokens: int  # the smallest batch size at which this micro-batch is used
    micro_batch: int  # micro-batch size in sequences


class RampPlan(Entry):
    """The plan of a batch ramp: the recommended first batch size, and the cost of other first batch sizes."""

    share: float  # lowest acceptable throughput at the start, as a share of the full batch's throughput
    start: RampPoint  # the recommended first batch size: the smallest with an acceptable throughput
    increment_tokens: int  # tokens by which the batch grows each time
    micro_batches: list[RampMicroBatch]  # the fastest micro-batch by batch size, from the recommended start
    points: list[RampPoint]  # speeds by batch size, from the smallest to the full batch
    choices: list[RampChoice]  # ramps with different first batch sizes
    own: RampChoice | None  # the ramp or the stages in the recipe; null if the recipe has neither

    @property
    def chosen(self) -> RampChoice:
        return next(choice for choice in self.choices if choice.start_tokens == self.start.batch_tokens)


class Comparison(Entry):
    asked: float  # seconds or GiB of the requested layout
    chosen: float  # seconds or GiB of the chosen layout


class Explanation(Entry):
    """Why a layout that the user asked about was not chosen."""

    asked: str  # the requested values as the user typed them
    line: str  # why the layout was not chosen
    possible: bool  # whether a layout with the requested values exists
    fits: bool  # whether such a layout fits in memory
    layout: Layout | None  # the fastest layout with the requested values; if none fits, the one with the least memory
    step_seconds: float | None
    seconds: dict[str, Comparison]  # seconds of an optimizer step by part, e.g. compute
    gib: dict[str, Comparison]  # memory in GiB by part, e.g. weights


class CalibrationRow(Entry):
    """Factors from measured runs. They multiply the predicted time and memory."""

    time: float  # factor on the predicted time of a step
    memory: float | None  # factor on the predicted memory; null if memory was not measured
    runs: int  # number of measured runs
    low: float  # smallest time factor among the measured runs
    high: float  # largest time factor among the measured runs
    measurement: bool  # whether the factors come from --measure
    uncalibrated_step_seconds: float
    says: str  # a sentence that describes the calibration


class PublishedTimes(Entry):
    """Ratios (measured / planned step time) of published runs on an accelerator."""

    accelerator: str  # the first word of the accelerator's name, e.g. H100
    experts: bool  # whether the models are mixtures of experts
    code: str  # the training code, with its year if the source has one
    rows: int  # number of measured runs
    low: float  # smallest ratio of all rows
    high: float  # largest ratio of all rows
    source: str  # where the rows were published


class PlanDocument(Document, schema="plan/1"):
    """The result of ``leaven plan RECIPE --gpus CLUSTER``."""

    cluster: str
    gpus: int
    params: int  # number of parameters, embeddings included
    params_active: int  # number of parameters that one token uses (fewer than params in a mixture of experts)
    layout: Layout
    memory: MemoryPlan
    speed: SpeedPlan  # speed at the full batch size
    time: dict[str, float]  # seconds of an optimizer step by part, e.g. compute
    days: float
    gpu_hours: float
    flops_convention: str
    alternatives: list[CandidateRow]  # the next fastest layouts that fit in memory
    cost: CostRow
    stages: list[StageMemory]  # memory by pipeline rank
    pareto: list[CandidateRow]  # layouts that no other layout beats in both time and memory
    untrained: CandidateRow | None  # a faster layout that leaven can plan and export but not train
    ramp: RampPlan
    not_: list[str] = Field(alias="not")  # why layouts that differ in one setting (e.g. tp) were not chosen
    cautions: list[str]
    calibration: CalibrationRow | None  # correction that the planned times include; null if there is none
    published_times: list[PublishedTimes] = []  # for this accelerator; empty if the plan is calibrated
    explain: Explanation | None = None  # why the layout given with --explain was not chosen
    next: list[str] = []  # commands to type next


class FittingSize(Entry):
    """One law's best model size for a budget."""

    law: str  # scaling law that gives the ratio of tokens to parameters
    params: float
    tokens: float
    tokens_per_param: float
    flops: float
    days: float
    mfu: float
    tflops_per_gpu: float
    batch_tokens: int
    shape: dict[str, Any]  # the keys of [model] in a recipe, and the key params
    layout: Layout | None  # the fastest layout; null with --mfu


class RefusedRow(Entry):
    law: str
    why: str  # why no model size fits the budget by this law


class BudgetDocument(Document, schema="budget/1"):
    """The result of ``leaven plan --budget CLUSTERxTIME``."""

    cluster: str
    nodes: str  # nodes of the cluster and GPUs of each, e.g. 8 nodes of 8
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
    lines: list[str]  # the reason for these values, line by line
    reason: str  # the reason for these values in one line
    sources: list[str]  # published runs and laws that support the values


class ProxyRow(Entry):
    """The small proxy model on which a recipe is tuned."""

    params: int
    params_active: int  # number of parameters that one token uses (fewer than params in a mixture of experts)
    tokens: int  # number of tokens of one trial
    batch_tokens: int
    trials: int  # number of trials
    cost: float  # FLOPs of all trials / FLOPs of the recipe's run
    evidence: str  # what is known about tuning on proxies of this size


class ComparedRow(Entry):
    """A value of a new recipe, compared with similar published runs."""

    what: str  # the compared value in words
    path: str  # path of the value in the recipe
    value: float
    low: float  # lowest value among similar published runs
    high: float  # highest value among similar published runs
    factor: (
        float  # by which the value is outside the range from low to high; 1 if inside; of a beta: of 1 / (1 - beta)
    )
    outside: bool  # whether factor is above 1.25


class TimeFit(Entry):
    """The planned training time of a new recipe that was sized with ``leaven new --time``."""

    cluster: str
    seconds: float  # planned training time
    text_tokens: int | None  # length of the text, if it is too short to fill the given time; otherwise null


class NewRecipe(Document, schema="new/1"):
    """The result of ``leaven new OUT.toml`` for a new model."""

    path: str
    proxy_path: str | None
    params: int
    params_active: int  # number of parameters that one token uses (fewer than params in a mixture of experts)
    tokens: int
    steps: list[DerivationRow]  # how the recipe was derived
    proxy: ProxyRow | None
    tuning: str  # cost of tuning, and whether tuning is worth this cost
    compared: list[ComparedRow]  # values of the recipe, compared with similar published runs
    fit: TimeFit | None = None  # planned training time; null without --time
    next: list[str] = []  # commands to type next


class AdoptedRecipe(Document, schema="new-from-weights/1"):
    """The result of ``leaven new OUT.toml --from-weights DIR``."""

    path: str
    architecture: str
    params: int
    params_active: int  # number of parameters that one token uses (fewer than params in a mixture of experts)
    tokens: int
    unknown: list[str]  # values of the recipe that the model's config.json does not contain
    unread: list[str]  # what of it a recipe cannot contain
    next: list[str] = []  # commands to type next


class NoiseFitRow(Entry):
    """A power law for the gradient noise scale over the training tokens, fitted to measurements in a run."""

    points: int  # number of measurements
    from_tokens: int  # tokens trained before the first measurement
    to_tokens: int  # tokens trained before the last measurement
    last: float  # noise scale by the power law at to_tokens, in tokens
    exponent: float  # exponent of the power law
    scatter: float  # factor by which a typical measurement differs from the power law


class RampDocument(Document, schema="ramp/1"):
    """The result of ``leaven bench RECIPE --noise-from RUN``: a batch ramp from the measured noise scale."""

    noise: NoiseFitRow
    multiple: float  # largest allowed batch size, divided by the noise scale
    stages: list[dict[str, int]]  # from_tokens: tokens trained before the stage; tokens: batch size of the stage
    set: list[str]  # arguments of --set that put the ramp into a recipe; empty if no ramp is proposed
    steps: int  # optimizer steps with this ramp
    full_steps: int  # optimizer steps without a ramp
    why: str  # why this ramp is proposed, or why no ramp is proposed
    next: list[str] = []  # commands to type next


class BenchSpeed(Entry):
    micro_batch: int  # micro-batch size in sequences
    global_batch: int  # batch size in sequences
    tokens_per_second: float
    tflops: float
    mfu: float
    peak_gib: float  # peak memory of the GPU, or of the process on a CPU
    mfu_causal: float
    hfu: float


class RampStart(Entry):
    """The recommended first batch size of a batch ramp."""

    global_batch: int  # batch size in sequences
    batch_tokens: int
    micro_batch: int
    share_of_peak: float  # throughput at this batch size / highest measured throughput


class BenchChoice(Entry):
    micro_batch: int  # the fastest micro-batch at the largest measured batch size
    share: float  # lowest acceptable throughput of ramp_start, as a share of the highest throughput
    ramp_start: RampStart  # the smallest batch size with an acceptable throughput


class BenchDocument(Document, schema="bench/1"):
    """The result of ``leaven bench RECIPE``: measured speeds."""

    rows: list[BenchSpeed]
    choose: BenchChoice | None  # recommended sizes; null if the measurement of the first batch size was cut short
    too_large: list[int]  # micro-batch sizes that do not fit in memory
    whole: bool  # false if Ctrl-C or --seconds ended the measurement early
    unfinished: int | None  # batch size (in sequences) whose measurement was cut short; null if none was
    mfu_convention: str
    next: list[str] = []  # commands to type next
