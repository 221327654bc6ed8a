"""Documents of ``leaven show``, ``tune``, ``train``, ``export``, ``import``, ``report`` and further commands."""

from typing import Any

from leaven.documents import Document, Entry, Number, Sealed


class CautionRow(Entry):
    """A warning that a value is beyond a limit."""

    about: str  # name of the value that the warning is about, such as width ratio
    value: Number
    limit: Number  # the limit that value is beyond
    message: str  # what is beyond the limit, why it matters and what to do


class ParameterValues(Entry):
    name: str
    shape: list[int]  # [out, in] of a matrix; [experts, out, in] of routed experts
    role: str  # role of the parameter in the scaling rule
    module: str
    layer: int | None
    init_mean: float  # mean of the initial values: 1 for gains, otherwise 0
    init_std: float
    lr: float  # peak learning rate of this parameter
    weight_decay: float  # weight decay; with AdamW, each step multiplies the parameter by 1 - lr x weight_decay
    beta1: float  # for a matrix that Muon updates, the momentum; beta2 and eps are then 0
    beta2: float
    eps: float
    multiplier: float  # factor on the parameter's output in the forward pass
    match: float = 0.0  # factor on the steps of a matrix that Muon updates; 0 if Adam updates the parameter
    ratios: dict[str, float]  # recipe / its base: fans, head dimension, depth, batch, tokens and match


class Totals(Entry):
    params: int
    params_active: int  # number of parameters that one token uses (fewer than params in a mixture of experts)
    params_non_embedding: int  # params_active without token embedding, position embedding and unembedding
    flops_per_token: Number


class WorthRow(Entry):
    """What a study's gain is worth in training tokens, if only ``share`` of the gain survives the transfer."""

    share: float  # part of the gain that is assumed to survive, from 0 to 1
    gain: float  # surviving gain in nats per token
    times: Number  # factor on the training tokens that would lower the loss as much, by a published loss law


class ShowDocument(Document, schema="show/1"):
    """The result of ``leaven show RECIPE``, and of ``leaven transfer`` for the new recipe."""

    name: str  # name of the recipe
    start: str | None  # folder of the weights that the run starts from
    scale: dict[str, Any]  # width, depth, batch_tokens and tokens; the key base has those of the base
    rule: str
    ratios: dict[str, Number]  # size of the recipe / size of its base: width, depth, batch and tokens
    totals: Totals
    blocks: dict[str, Any] = {}  # architecture keys of [model] that differ from their default, such as norm_placement
    attention_scale: float  # factor on the product query . key
    optimizer: dict[str, str]  # name of the optimizer, and why it was chosen
    init: dict[str, Any]  # the recipe's init stds, and the init stds of published initialisations
    clip: dict[str, Any]  # gradient clipping: mode, limit, and why
    ramp: dict[str, str | None]  # rule of the batch ramp, and why
    parameters: list[ParameterValues]
    warnings: list[CautionRow]
    worth: list[WorthRow] = []  # what the gain of a study is worth in this run; empty except after leaven transfer
    next: list[str] = []  # commands to type next


class CellRow(Entry):
    text: str  # formula of a factor, e.g. I^-1 L^(alpha-1)
    source: str


class RuleDocument(Document, schema="rule/1"):
    """The result of ``leaven show --rule NAME``: the factors of a scaling rule."""

    rule: str
    source: str
    roles: dict[str, dict[str, CellRow]]  # factors by role of a parameter and by quantity, such as lr
    shared: dict[str, CellRow]  # factors that are the same for all roles
    letters: dict[str, str]  # meaning of each letter in the formulas


class BestTrial(Entry):
    loss: float  # nats per token
    interval: list[float]  # 95% interval of the loss
    recipe: str  # path of the recipe file
    in_doubt: bool = False  # whether the gain over the start may be luck


class Outlook(Entry):
    """The expected gain (decrease of the loss) if a search doubles its number of trials."""

    trials: int  # number of further trials
    flops: float  # cost of the further trials, at the mean cost of a trial
    gain: float | None  # expected gain of the further trials in nats; null if too few trials have run
    pair: tuple[str, str] | None = None  # recipe paths of the two values that matter most for the gain so far
    pair_share: float = 0.0  # predicted gain if only `pair` is changed / predicted gain of all changed numbers


class TuneDocument(Document, schema="tune/1"):
    """The result of ``leaven tune RECIPE --study DIR``. study.json in the study's folder lists every trial."""

    best: BestTrial | None
    outlook: Outlook | None  # null if the search is not a trust-region search or has not ended
    trials: int  # number of trials that have ended
    failed: int  # number of trials that diverged or failed
    noise_floor: float | None  # standard deviation of the loss between seeds, nats
    next: list[str] = []  # commands to type next


class TrainDocument(Document, schema="train/1"):
    """The result of ``leaven train RECIPE``."""

    loss: float | None  # validation loss, nats per token; null until the run is finished
    tokens: int
    steps: int
    seconds: float
    mfu: float | None  # model FLOPs utilization, median over the steps
    rollbacks: int
    bits_per_byte: float | None  # validation loss; null until finished, or if the tokenizer does not report bytes
    mfu_causal: float | None
    hfu: float | None
    mfu_convention: str | None
    unsaved: str | None  # why the checkpoint of a stopped run could not be saved; null if nothing failed
    saved_tokens: int  # tokens that the newest checkpoint was trained on; 0 without a checkpoint
    noise_scale: float | None  # latest measured gradient noise scale, in tokens
    averaged_loss: float | None = None  # validation loss of the averaged weights (nats); null without [average]
    finished: bool  # false if the run was stopped
    next: list[str] = []  # commands to type next


class SampleRow(Entry):
    text: str
    tokens: int
    ended: bool  # whether the model ended the text with an end-of-text token


class SampleDocument(Document, schema="sample/1"):
    """The result of ``leaven sample RUN TEXT``."""

    run: str
    tokens: int  # tokens that the checkpoint was trained on
    prompt: str
    samples: list[SampleRow]


class WeightsDocument(Document, schema="export-weights/1"):
    """The result of ``leaven export weights RUN DIR``."""

    path: str
    architecture: str
    tokens: int  # tokens that the checkpoint was trained on
    averaged: bool = False  # whether these are the averaged weights
    next: list[str] = []  # commands to type next


class LossRow(Entry):
    """A value of a recipe that is lost in an export, because the other trainer's configuration cannot express it."""

    key: str  # key of the recipe, or a quantity and its modules, such as "lr of embedding, unembedding"
    value: Any  # value in the recipe
    why: str  # what the other trainer does instead, and why it cannot have the value

    @property
    def text(self) -> str:
        return f"{self.key} = {_spelled(self.value)}: {self.why}"


def _spelled(value: Any) -> str:
    """Return a value as text, as in a recipe, but with no quotes around strings."""
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:.12g}"
        case dict():
            return "{" + ", ".join(f"{key} = {_spelled(inner)}" for key, inner in value.items()) + "}"
        case _:
            return f"{value}"


class ConfigDocument(Document, schema="export-config/1"):
    """The result of ``leaven export config RECIPE --to TARGET``."""

    path: str
    lost: list[LossRow]  # values of the recipe that the configuration of TARGET cannot express
    notes: list[str]
    next: list[str] = []  # commands to type next


class ImportDocument(Document, schema="import-config/1"):
    """The result of ``leaven import config FILE --from SOURCE``."""

    path: str | None
    unknown: list[str]  # values of the recipe that FILE does not contain
    unread: list[str]  # settings in FILE that a recipe cannot contain
    recipe: dict[str, Any]
    next: list[str] = []  # commands to type next


class ServeDocument(Document, schema="serve/1"):
    """The result of ``leaven serve``, printed when the server starts."""

    url: str  # the address to open in a browser; it contains the access token
    folders: list[str]  # the folders that the server searches for runs and studies


class ReportDocument(Document, schema="report/1"):
    """The result of ``leaven report PATH``."""

    path: str  # path of the HTML page


class ComparedRun(Entry):
    path: str
    name: str  # name of the recipe
    finished: bool
    loss: float | None  # last validation loss, nats per token
    difference: float | None  # loss of this run - loss of the first run; null for the first run
    speedup: float | None  # tokens of the first run / tokens of this run, both up to the same loss; null if unknown
    tokens: int
    seconds: float | None
    tokens_per_second: float | None  # median over the steps
    rollbacks: int


class ComparedValue(Entry):
    path: str  # path of the value in the recipe
    values: list[Any]  # the value in the recipe of each run, in the order of `runs`; null where it is not set


class ComparisonDocument(Document, schema="comparison/1"):
    """The result of ``leaven report RUN RUN...``."""

    path: str  # path of the HTML page
    runs: list[ComparedRun]  # the first run, and the runs that are compared with it
    different: list[ComparedValue]  # the values in which the recipes differ
    warnings: list[str]  # why losses or speeds of these runs may not be comparable


class DemoModel(Entry):
    width: int
    params: int  # number of parameters, including embeddings


class DemoRun(Entry):
    """A training run of the demo. At the smallest width, ``rule`` is complete-d-p, which changes nothing there."""

    rule: str  # standard keeps the hyperparameters of the smallest width; complete-d-p scales them to this width
    width: int
    lr: float  # learning rate at the smallest width, to which the rule is applied
    seed: int  # seed of the initialisation and of the order of the data
    loss: float  # validation loss, nats per token
    seconds: float  # training time


class DemoResult(Entry):
    lr: float  # learning rate with the lowest mean loss at the base, which is the smallest width
    width: int  # the largest width
    base: list[float]  # loss of each seed at the base
    copied: list[float]  # loss of each seed at the largest width, with hyperparameters copied from the base
    moved: list[float]  # loss of each seed at the largest width, with hyperparameters scaled by the rule
    difference: float  # mean of copied - moved over the seeds, nats per token
    low: float  # lower end of the 95% interval of `difference` (Student's t over paired seeds)
    high: float  # upper end of the 95% interval of `difference`


class DemoCorpus(Entry):
    source: str
    bytes: int
    train_tokens: int
    validation_tokens: int
    vocab_size: int


class DemoDocument(Sealed, Document, schema="demo/2"):
    """The result of ``leaven demo``. The file demo.json in the demo's folder has the same keys."""

    name: str  # always leaven demo
    size: str  # full or quick
    source: str  # the training text, written as data.source in a recipe
    tokens: int  # training tokens of each run
    models: list[DemoModel]  # from the smallest width, the base, to the largest
    lrs: list[float]  # the learning rates that are tried, as values at the smallest width
    seeds: int  # seeds of each learning rate at the smallest width, and of the best learning rate at the largest
    machine: dict[str, Any]  # processor, cores, memory and versions
    corpus: DemoCorpus  # source and size of the text
    runs: list[DemoRun] = []  # empty until the demo has finished
    result: DemoResult | None = None  # null until the demo has finished
    processes: int = 0  # number of worker processes
    seconds: float = 0.0  # total time of all calls of leaven demo in this folder until the demo finished
    report: str | None = None  # path of the HTML page
    next: list[str] = []  # commands to type next

    def losses(self, rule: str, width: int) -> dict[float, list[float]]:
        """Return the losses of a rule's runs at a width, by learning rate, in the order of the seeds.

        At the smallest width, return the losses of all runs, because all rules give the same model there.
        """
        found: dict[float, list[float]] = {}
        for run in sorted(self.runs, key=lambda run: run.seed):
            if run.width == width and (run.rule == rule or width == self.models[0].width):
                found.setdefault(run.lr, []).append(run.loss)
        return found
