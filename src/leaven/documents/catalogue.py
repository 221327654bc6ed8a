"""Define the documents about published runs, laws and accelerators."""

from typing import Any, Literal

from pydantic import ConfigDict

from leaven.documents import Document, Entry, Number


class RunSummary(Document, schema="run-summary/1"):
    """A published run in brief. ``leaven recipes list`` prints a list of these."""

    id: str
    params: int  # all parameters
    tokens: int | None
    peak_lr: float | None
    batch_tokens: int | None
    source: str  # source of the learning rate
    params_active: int  # parameters that one token uses
    kind: str  # dense, moe or vlm
    optimizer: str | None
    decay: str | None  # shape of the learning rate's decay
    lineage: str  # model family that its learning rate comes from; by default the run's own family
    lr_comparable: bool  # false for runs with muP or an optimizer other than Adam(W)


class NearRun(RunSummary, schema="near-run/1"):
    """A published run near a given size. ``leaven recipes nearest`` prints a list of these, the nearest first."""

    distance: float  # distance in octaves of parameters; an octave of tokens counts as an eighth
    size_ratio: float  # larger size / smaller size
    within_factor: bool  # whether size_ratio is within --factor
    same_stack: bool  # whether the run has the requested norms and optimizer
    stack: str  # norms and optimizer of the run


class PublishedRunDocument(Document, schema="published-run/1"):
    """A published run in full: groups of values with their sources, without unknown values.

    ``leaven recipes show`` prints it.
    """

    model_config = ConfigDict(extra="allow")

    id: str
    family: str
    organisation: str


class DifferenceRow(Document, schema="difference/1"):
    """A value in which two published runs differ. ``leaven recipes diff`` prints a list of these."""

    path: str  # path of the value, e.g. model.d_model
    a: Any  # value of the first side
    b: Any  # value of the second side


class RecipeDifference(DifferenceRow, schema="recipe-difference/1"):
    """A value in which a recipe file differs from a run or recipe. ``leaven recipes diff`` prints a list of these."""

    counterpart: bool  # whether both sides can state this value


Severity = Literal["far outside", "outside", "note"]


class FindingRow(Entry):
    path: str  # path of the value in the recipe
    severity: Severity
    value: float | None
    low: float | None  # lower end of the range of published runs
    high: float | None  # upper end of this range
    factor: float | None  # factor by which the value is outside the range; null if it is not a number
    says: str  # the finding as a sentence
    runs: list[str]  # ids of published runs that support the finding
    did_so: list[str]  # ids of published runs that were as far outside and succeeded
    alike: list[str]  # ids from did_so of runs with the recipe's size, lr, batch and stack
    mends: list[dict[str, Any]]  # changes that correct the value, by path, the best first; null removes a value
    check: str  # name of the check
    source: str


class RecipeCheck(Document, schema="recipe-check/1"):
    """The result of ``leaven recipes check``: a recipe's values compared with those of published runs."""

    name: str
    params: int
    tokens: int
    passed: bool  # whether no value is outside; notes are allowed
    checks: list[str]  # names of all checks
    findings: list[FindingRow]  # the farthest outside first
    next: list[str]  # commands


class BeyondRange(Entry):
    axis: str  # N parameters, D tokens, C FLOPs or D/N tokens a parameter
    side: str  # above or below the fitted range
    factor: float  # how far beyond the fitted range


class LrAtBatch(Entry):
    batch_tokens: Number
    ratio: float  # batch_tokens / the batch at which the law's lr holds
    square_root: float  # lr scaled with the square root of the ratio
    linear: float  # lr scaled with the ratio
    surge: float  # lr by the surge rule for Adam, in which it falls above the noise scale
    own: float | None  # lr scaled with the law's own exponent; null if it gives none


class LawRow(Document, schema="law/1"):
    """What one scaling law predicts for a run. ``leaven laws --params --tokens`` prints a list of these."""

    law: str
    lr: float | None  # peak; null if the law gives none
    batch_tokens: Number | None
    batch_kind: str | None  # optimal or critical
    in_range: bool | None  # whether the point is in the fitted range; null if the range is not known
    extrapolation: float | None  # the largest factor beyond the fitted range
    conditions: str  # what the law was fitted on
    source: str
    loss: float | None  # nats per token
    tau: float | None  # timescale of weight decay, as a share of the run
    says: str  # the statement of a law without a number
    trust: str  # verified, read, secondary or memory
    doubt: str  # reasons to doubt the law
    params_definition: str  # what N counts
    beyond: list[BeyondRange]  # where the point is beyond the fitted range
    form_of: str | None  # the law of which this is another form
    lr_batch_tokens: Number | None  # the batch at which lr holds
    lr_batch_exponent: float | None  # exponent with which lr grows with the batch
    at_batch: LrAtBatch | None = None  # lr at --batch-tokens, by several rules
    batch_ratio: float | None = None  # --batch-tokens / the law's batch


class OptimumRow(Document, schema="optimum/1"):
    """The best model size for a compute budget by one law. ``leaven laws --flops`` prints a list of these."""

    law: str
    params: float
    tokens: float
    tokens_per_param: float
    loss: float | None  # nats per token, by this law
    loss_replication: float | None  # by the replication of Chinchilla (Besiroglu et al. 2024)
    in_range: bool | None  # whether the optimum is in the fitted range; null if the range is not known
    extrapolation: float | None  # the largest factor beyond the fitted range
    beyond: list[BeyondRange]  # where the optimum is beyond the fitted range
    conditions: str  # what the law was fitted on
    source: str
    trust: str  # verified, read, secondary or memory
    doubt: str  # reasons to doubt the law


Confidence = Literal["vendor", "read", "memory", "yours", "guess"]


class NumberSource(Entry):
    group: str  # group of numbers: peak, matmul, memory, board, link or network
    text: str
    confidence: Confidence  # how reliable the source is


class AcceleratorRow(Document, schema="accelerator/1"):
    """The published numbers of an accelerator. ``leaven hardware`` prints a list of these, or only the named one."""

    name: str
    peak_tflops: dict[str, float | None]  # dense peak by dtype
    matmul_tflops: dict[str, float | None]  # best measured rate of a matmul by dtype
    planned_tflops: float  # rate that the planner assumes for a 16-bit matmul
    memory_gib: float
    memory_tb_s: float
    power_w: float | None
    multiprocessors: int | None
    link_gb_s: float  # in one direction, within a node
    node_size: int  # accelerators that the link connects
    network_gb_s: float  # in one direction, of one accelerator
    note: str
    sources: list[NumberSource]
