"""Documents about published runs, laws and accelerators."""

from typing import Any, Literal

from pydantic import ConfigDict

from leaven.documents import Document, Entry, Number


class RunSummary(Document, schema="run-summary/1"):
    """A summary of a published run or of a run tuned with leaven, shown by ``leaven recipes list``."""

    id: str
    params: int  # number of parameters, embeddings included
    tokens: int | None
    peak_lr: float | None
    batch_tokens: int | None
    source: str  # source of peak_lr
    params_active: int  # number of parameters that one token uses (fewer than params in a mixture of experts)
    kind: str  # dense, moe or vlm
    optimizer: str | None
    decay: str | None  # shape of the learning rate's decay
    lineage: str  # model family from which the learning rate was inherited; by default the run's own family
    lr_comparable: bool  # false if peak_lr is null, or is for muP or an optimizer other than Adam(W)


class NearRun(RunSummary, schema="near-run/1"):
    """One of the published runs nearest to a given size. ``leaven recipes nearest`` prints a list of these."""

    distance: float  # distance in parameters and tokens, in octaves (factors of 2); an octave of tokens counts as 1/8
    size_ratio: float  # larger / smaller of the run's params and the requested params
    within_factor: bool  # whether size_ratio is within --factor
    same_stack: bool  # whether the run has the requested norm placement, QK-norm and optimizer
    stack: str  # norm placement, QK-norm and optimizer of the run


class PublishedRunDocument(Document, schema="published-run/1"):
    """The result of ``leaven recipes show``: the known values of a run and their sources, in groups."""

    model_config = ConfigDict(extra="allow")

    id: str
    family: str
    organisation: str


class DifferenceRow(Document, schema="difference/1"):
    """A value that differs between two published runs or recipes, as in ``leaven recipes diff``."""

    path: str  # path of the value, e.g. model.d_model
    a: Any  # value of the first run or recipe
    b: Any  # value of the second run or recipe


class RecipeDifference(DifferenceRow, schema="recipe-difference/1"):
    """A value in which two recipes, or a recipe and a run, differ. ``leaven recipes diff`` prints a list of these."""

    counterpart: bool  # false if only a recipe, or only a published run, can have this value


Severity = Literal["far outside", "outside", "note"]  # the worst first


class FindingRow(Entry):
    path: str  # path of the value in the recipe
    severity: Severity
    value: float | None
    low: float | None  # lower end of the usual range; null if the check has no range
    high: float | None  # upper end of the usual range; null if the check has no range
    factor: float | None  # factor by which the value is outside the usual range; null if the check has no range
    says: str  # the finding as a sentence
    runs: list[str]  # ids of published runs that support the finding
    did_so: list[str]  # ids of published runs whose value is at least as far outside
    alike: list[str]  # ids in did_so of runs with Adam(W), the recipe's norms, and about its size, lr and batch
    mends: list[dict[str, Any]]  # suggestions, the best first: new values by path; null removes a value
    check: str  # name of the check
    source: str


class RecipeCheck(Document, schema="recipe-check/1"):
    """The result of ``leaven recipes check``: a recipe's values compared with those of published runs."""

    name: str
    params: int
    params_active: int  # number of parameters that one token uses, by which the recipe is compared
    tokens: int
    passed: bool  # true if no finding is more severe than "note"
    checks: list[str]  # names of all checks
    findings: list[FindingRow]  # the most severe come first
    next: list[str] = []  # commands to type next


class BeyondRange(Entry):
    axis: str  # N (parameters), D (tokens), C (FLOPs), D/N (tokens per parameter) or E (experts)
    side: str  # "above" or "below" the range on which the law was fitted
    factor: float  # factor between the value and the nearer end of the fitted range


class LrAtBatch(Entry):
    batch_tokens: Number
    ratio: float  # batch_tokens divided by lr_batch_tokens, the batch size for which the law predicts its lr
    square_root: float  # the law's lr times the square root of ratio
    linear: float  # the law's lr times ratio
    surge: float  # lr by the surge rule for Adam (Li et al. 2024): highest if batch_tokens is the noise scale
    own: float | None  # the law's lr times ratio^lr_batch_exponent; null if the law has no lr_batch_exponent


class LawRow(Document, schema="law/1"):
    """What one scaling law predicts for a run. ``leaven laws --params --tokens`` prints a list of these."""

    law: str
    lr: float | None  # peak lr; null if the law does not predict the lr
    batch_tokens: Number | None
    batch_kind: str | None  # whether batch_tokens is the optimal or the critical batch size
    in_range: bool | None  # whether the run is in the law's fitted range; null if the range is not known
    extrapolation: float | None  # the largest factor by which the run is beyond the fitted range
    conditions: str  # the training runs on which the law was fitted
    source: str
    loss: float | None  # predicted loss in nats per token; null if the law does not predict the loss
    tau: float | None  # predicted timescale of weight decay, as a share of the run
    says: str  # what the law states, if it predicts no number; otherwise empty
    trust: str  # verified (read and recomputed), read (in the paper), secondary (in another text) or memory
    doubt: str  # reasons to doubt the law
    params_definition: str  # which parameters the law counts as model size: all, or without some embeddings
    beyond: list[BeyondRange]  # the axes on which the run is beyond the fitted range
    form_of: str | None  # name of the main law, if this law is another form of the same fit
    of_experts: bool = False  # whether the prediction depends on the number of experts
    lr_batch_tokens: Number | None  # the batch size for which lr is predicted
    lr_batch_exponent: float | None  # exponent of the batch size in the law for lr
    at_batch: LrAtBatch | None = None  # lr at --batch-tokens, by several rules
    batch_ratio: float | None = None  # --batch-tokens divided by the batch size that the law predicts


class OptimumRow(Document, schema="optimum/1"):
    """One law's best model size for a compute budget. ``leaven laws --flops`` prints these rows."""

    law: str
    params: float
    tokens: float
    tokens_per_param: float
    loss: float | None  # predicted loss of this model size in nats per token, by this law
    loss_replication: float | None  # predicted loss by the replication of Chinchilla (Besiroglu et al. 2024)
    in_range: bool | None  # whether the optimum is in the law's fitted range; null if the range is not known
    extrapolation: float | None  # the largest factor by which the optimum is beyond the fitted range
    beyond: list[BeyondRange]  # the axes on which the optimum is beyond the fitted range
    conditions: str  # the training runs on which the law was fitted
    source: str
    trust: str  # verified (read and recomputed), read (in the paper), secondary (in another text) or memory
    doubt: str  # reasons to doubt the law


Confidence = Literal["vendor", "read", "memory", "yours", "guess"]


class NumberSource(Entry):
    group: str  # the numbers that come from this source: peak, matmul, sustained, memory, board, link or network
    text: str
    confidence: Confidence  # how reliable the source is


class AcceleratorRow(Document, schema="accelerator/1"):
    """The numbers of an accelerator that ``leaven hardware`` prints: published ones, and what the planner assumes."""

    name: str
    peak_tflops: dict[str, float | None]  # peak speed without sparsity, by dtype
    matmul_tflops: dict[str, float | None]  # highest measured speed of a matmul, by dtype
    planned_tflops: float  # speed of large 16-bit matmuls that the planner assumes
    sustained_tflops: dict[str, float] = {}  # measured speed of large 16-bit operators; empty if not measured
    memory_gib: float
    memory_tb_s: float
    power_w: float | None
    multiprocessors: int | None
    link_gb_s: float  # bandwidth in one direction between accelerators of a node
    node_size: int  # number of accelerators in a node
    network_gb_s: float  # bandwidth in one direction between nodes, per accelerator
    note: str
    sources: list[NumberSource]
