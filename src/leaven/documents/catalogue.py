"""Documents about published runs, laws and accelerators."""

from typing import Any, Literal

from pydantic import ConfigDict

from leaven.documents import Document, Entry, Number


class RunSummary(Document, schema="run-summary/1"):
    """``leaven recipes list``: a list of these."""

    id: str
    params: int  # all parameters
    tokens: int | None
    peak_lr: float | None
    batch_tokens: int | None
    source: str  # of the learning rate
    params_active: int  # that a token passes
    kind: str  # dense, moe or vlm
    optimizer: str | None
    decay: str | None  # shape of the learning rate's decay
    lineage: str  # where its learning rate comes from; by default its own family
    lr_comparable: bool  # false with muP or an optimizer other than Adam(W)


class NearRun(RunSummary, schema="near-run/1"):
    """``leaven recipes nearest``: a list of these, the nearest first."""

    distance: float  # octaves of parameters; an octave of tokens counts as an eighth
    size_ratio: float  # larger size / smaller size
    within_factor: bool  # whether size_ratio is within --factor
    same_stack: bool  # whether it has the requested norms and optimizer
    stack: str  # its norms and optimizer


class PublishedRunDocument(Document, schema="published-run/1"):
    """``leaven recipes show``: one file of the catalogue, groups with their sources; unknown values are left out."""

    model_config = ConfigDict(extra="allow")

    id: str
    family: str
    organisation: str


class DifferenceRow(Document, schema="difference/1"):
    """``leaven recipes diff``: a list of these."""

    path: str
    a: Any
    b: Any


class RecipeDifference(DifferenceRow, schema="recipe-difference/1"):
    """``leaven recipes diff`` where one side is a recipe file: a list of these."""

    counterpart: bool  # whether both sides have such a value


Severity = Literal["far outside", "outside", "note"]


class FindingRow(Entry):
    path: str  # the recipe's value
    severity: Severity
    value: float | None
    low: float | None  # end of the range of published runs
    high: float | None
    factor: float | None  # how far beyond the range; null if it is not a number
    says: str
    runs: list[str]  # ids of runs that show it
    did_so: list[str]  # ids of runs that were as far outside and succeeded
    alike: list[str]  # those of them with the recipe's size, lr, batch and stack
    mends: list[dict[str, Any]]  # what to set by path, the best first; null removes a value
    check: str
    source: str


class RecipeCheck(Document, schema="recipe-check/1"):
    """``leaven recipes check``."""

    name: str
    params: int
    tokens: int
    passed: bool  # nothing outside; notes are allowed
    checks: list[str]  # all checks
    findings: list[FindingRow]  # the farthest outside first
    next: list[str]  # commands


class BeyondRange(Entry):
    axis: str  # N parameters, D tokens, C FLOPs or D/N tokens a parameter
    side: str  # above or below
    factor: float


class LrAtBatch(Entry):
    batch_tokens: Number
    ratio: float  # to the law's own batch
    square_root: float
    linear: float
    surge: float
    own: float | None  # by the law's own data


class LawRow(Document, schema="law/1"):
    """``leaven laws --params --tokens``: a list of these."""

    law: str
    lr: float | None  # peak; null if the law gives none
    batch_tokens: Number | None
    batch_kind: str | None  # optimal or critical
    in_range: bool | None  # null where the fitted range is not known
    extrapolation: float | None  # the largest factor beyond the range
    conditions: str  # what it was fitted on
    source: str
    loss: float | None  # nats a token
    tau: float | None  # timescale of weight decay, as a share of the run
    says: str  # the statement of a law without a number
    trust: str  # verified, read, secondary or memory
    doubt: str
    params_definition: str  # what N counts
    beyond: list[BeyondRange]
    form_of: str | None  # the law that this is another form of
    lr_batch_tokens: Number | None  # the batch at which lr holds
    lr_batch_exponent: float | None
    at_batch: LrAtBatch | None = None  # the lr at --batch-tokens, by several rules
    batch_ratio: float | None = None  # --batch-tokens over the law's batch


class OptimumRow(Document, schema="optimum/1"):
    """``leaven laws --flops``: a list of these."""

    law: str
    params: float
    tokens: float
    tokens_per_param: float
    loss: float | None  # nats a token, by the law
    loss_replication: float | None  # by the replication of Chinchilla (Besiroglu et al. 2024)
    in_range: bool | None
    extrapolation: float | None
    beyond: list[BeyondRange]
    conditions: str
    source: str
    trust: str
    doubt: str


Confidence = Literal["vendor", "read", "memory", "yours", "guess"]


class NumberSource(Entry):
    group: str  # peak, matmul, memory, board, link or network
    text: str
    confidence: Confidence


class AcceleratorRow(Document, schema="accelerator/1"):
    """``leaven hardware``: a list of these; with a name, one."""

    name: str
    peak_tflops: dict[str, float | None]  # dense, by dtype
    matmul_tflops: dict[str, float | None]  # best measured, by dtype
    planned_tflops: float  # of a 16-bit matmul, as the planner assumes it
    memory_gib: float
    memory_tb_s: float
    power_w: float | None
    multiprocessors: int | None
    link_gb_s: float  # one direction, within a node
    node_size: int  # accelerators that the link joins
    network_gb_s: float  # one direction, of one accelerator
    note: str
    sources: list[NumberSource]
