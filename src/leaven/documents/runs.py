"""Define the documents of the commands that take a recipe or a run."""

from typing import Any

from leaven.documents import Document, Entry, Number


class CautionRow(Entry):
    about: str  # name of the value
    value: Number
    limit: Number
    message: str


class ParameterValues(Entry):
    name: str
    shape: list[int]  # [out, in]
    role: str  # role of the parameter in the scaling rule
    module: str
    layer: int | None
    init_mean: float  # 1 for gains
    init_std: float
    lr: float  # peak learning rate of this parameter
    weight_decay: float  # per step and unit of lr
    beta1: float
    beta2: float
    eps: float
    multiplier: float  # factor on its output in the forward pass
    ratios: dict[str, float]  # target / base: fans of this parameter, head, depth, batch, tokens


class Totals(Entry):
    params: int
    params_non_embedding: int
    flops_per_token: Number


class WorthRow(Entry):
    """What a study's gain is worth at another size, if a share of it survives the transfer."""

    share: float
    gain: float  # nats per token: the share of what the study gained
    times: Number  # how many times the tokens would gain as much there, by a published loss law


class ShowDocument(Document, schema="show/1"):
    """The result of ``leaven show RECIPE``, and of ``leaven transfer`` for the new recipe."""

    name: str  # name of the recipe
    start: str | None  # folder of the weights that the run starts from
    scale: dict[str, Any]  # width, depth, batch_tokens, tokens, and the base
    rule: str
    ratios: dict[str, Number]  # target / base
    totals: Totals
    attention_scale: float  # factor on query . key
    optimizer: dict[str, str]  # name, and why it was chosen
    init: dict[str, Any]  # the init that applies, and the values that published inits would give
    clip: dict[str, Any]  # gradient clipping: mode, limit, and why
    ramp: dict[str, str | None]  # rule of the batch ramp, and why
    parameters: list[ParameterValues]
    warnings: list[CautionRow]
    worth: list[WorthRow] = []  # of the study whose answer was transferred, at this size
    next: list[str]  # commands


class CellRow(Entry):
    text: str  # as the source prints it, e.g. I^-1 L^(alpha-1)
    source: str


class RuleDocument(Document, schema="rule/1"):
    """The result of ``leaven show --rule NAME``: the table of a scaling rule."""

    rule: str
    source: str
    roles: dict[str, dict[str, CellRow]]  # entries by role and quantity
    shared: dict[str, CellRow]  # entries that all roles share
    letters: dict[str, str]  # meaning of each letter


class BestTrial(Entry):
    loss: float  # nats per token
    interval: list[float]  # 95% interval of the loss
    recipe: str  # path of the recipe file


class OutlookRow(Entry):
    trials: int  # as many further trials as the search has run
    flops: float  # their cost
    gain: float | None  # nats that they are expected to gain; null after too few trials
    pair: list[str] | None  # paths of the two values that alone bring the most of the predicted gain; null if unknown
    pair_share: float  # of the predicted gain


class TuneDocument(Document, schema="tune/1"):
    """The result of ``leaven tune RECIPE --study DIR``. study.json in the study's folder lists every trial."""

    best: BestTrial | None
    outlook: OutlookRow | None  # of a trust-region search that has ended
    trials: int  # number of trials that have ended
    failed: int  # number of trials that diverged or failed
    noise_floor: float | None  # standard deviation of the loss between seeds, nats
    next: list[str]  # commands


class TrainDocument(Document, schema="train/1"):
    """The result of ``leaven train RECIPE``."""

    loss: float | None  # validation loss, nats per token; null until the run is finished
    tokens: int
    steps: int
    seconds: float
    mfu: float | None  # median over the steps
    rollbacks: int
    bits_per_byte: float | None  # null if the tokenizer does not report bytes
    mfu_causal: float | None
    hfu: float | None
    mfu_convention: str | None
    unsaved: str | None  # why a stopped run could not be saved
    saved_tokens: int  # tokens of the newest checkpoint
    noise_scale: float | None  # gradient noise scale, in tokens
    finished: bool  # false if the run was stopped
    next: list[str] = []  # commands


class SampleRow(Entry):
    text: str
    tokens: int
    ended: bool  # whether an end-of-text token ended it


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
    next: list[str]  # commands


class LossRow(Entry):
    key: str
    value: Any
    why: str


class ConfigDocument(Document, schema="export-config/1"):
    """The result of ``leaven export config RECIPE --to TARGET``."""

    path: str
    lost: list[LossRow]  # what the target cannot express
    notes: list[str]
    next: list[str]  # commands


class ImportDocument(Document, schema="import-config/1"):
    """The result of ``leaven import config FILE --from SOURCE``."""

    path: str | None
    unknown: list[str]  # values that the source does not give
    unread: list[str]  # values that a recipe cannot store
    recipe: dict[str, Any]
    next: list[str]  # commands


class ServeDocument(Document, schema="serve/1"):
    """The result of ``leaven serve``, printed when the server starts."""

    url: str  # the address to open; it contains the token
    folders: list[str]  # the folders that it shows


class ReportDocument(Document, schema="report/1"):
    """The result of ``leaven report PATH``."""

    path: str


class ComparedRun(Entry):
    path: str
    name: str  # of the recipe
    finished: bool
    loss: float | None  # last validation loss, nats per token
    difference: float | None  # loss - loss of the first run; null for the first run
    speedup: float | None  # tokens of the first run / tokens after which this run had the first run's last loss
    tokens: int
    seconds: float | None
    tokens_per_second: float | None  # median over the steps
    rollbacks: int


class ComparedValue(Entry):
    path: str  # path of the value in the recipe
    values: list[Any]  # of each run, in order; null if it is not set


class ComparisonDocument(Document, schema="comparison/1"):
    """The result of ``leaven report RUN RUN...``."""

    path: str  # the page
    runs: list[ComparedRun]  # the first is the one that the others are compared with
    different: list[ComparedValue]  # the values in which the recipes differ
    warnings: list[str]  # why losses or speeds of these runs may not be comparable


class DemoModel(Entry):
    width: int
    params: int  # all parameters


class DemoRun(Entry):
    rule: str  # standard: all values copied; complete-d-p: moved by the rule; the base width is only run once
    width: int
    lr: float  # base value
    seed: int  # of the initialisation and the order of the data
    loss: float  # validation, nats per token
    seconds: float  # training time


class DemoResult(Entry):
    lr: float  # base value with the lowest mean loss at the base width
    width: int  # the widest
    base: list[float]  # loss of each seed at the base width
    copied: list[float]  # loss of each seed at the widest, all values copied
    moved: list[float]  # loss of each seed at the widest, values moved by the rule
    difference: float  # mean of copied - moved over the seeds, nats per token
    low: float  # end of its 95% interval (Student's t over paired seeds)
    high: float  # the other end


class DemoCorpus(Entry):
    source: str
    bytes: int
    train_tokens: int
    validation_tokens: int
    vocab_size: int


class DemoDocument(Document, schema="demo/2"):
    """The result of ``leaven demo``. demo.json in its folder is the same, and exists while it runs."""

    name: str  # leaven demo
    size: str  # full or quick
    source: str  # of the text
    tokens: int  # of each run
    models: list[DemoModel]  # by width, the base first
    lrs: list[float]  # the grid, base values
    seeds: int  # at the base width, and of the result
    machine: dict[str, Any]  # processor, cores, memory and versions
    corpus: DemoCorpus  # the text
    runs: list[DemoRun] = []  # all of them when the demo has ended
    result: DemoResult | None = None  # null while the demo has not finished
    processes: int = 0  # that trained side by side
    seconds: float = 0.0  # elapsed, over all calls in this folder
    report: str | None = None  # the page
    next: list[str] = []  # commands
