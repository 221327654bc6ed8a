"""Documents of the verbs that take a recipe or a run."""

from typing import Any

from pydantic import Field

from leaven.documents import Document, Entry, Number


class CautionRow(Entry):
    about: str
    value: Number
    limit: Number
    message: str


class ParameterValues(Entry):
    name: str
    shape: list[int]  # out, in
    role: str  # what it is to the rule
    module: str
    layer: int | None
    init_mean: float  # 1 for gains
    init_std: float
    lr: float  # its own peak
    weight_decay: float  # per step and lr
    beta1: float
    beta2: float
    eps: float
    multiplier: float  # of its forward
    ratios: dict[str, float]  # target / base: its own fans, head, depth, batch, tokens


class Totals(Entry):
    params: int
    params_non_embedding: int
    flops_per_token: Number


class ShowDocument(Document, schema="show/1"):
    """``leaven show RECIPE``, and ``leaven transfer`` of the new recipe."""

    name: str  # of the recipe
    start: str | None  # folder of the weights that the run starts from
    scale: dict[str, Any]  # width, depth, batch_tokens, tokens, and the base
    rule: str
    ratios: dict[str, Number]  # target / base
    totals: Totals
    attention_scale: float  # of query . key
    optimizer: dict[str, str]  # name, and why
    init: dict[str, Any]  # which init applies, and what published ones would give
    clip: dict[str, Any]  # of gradients: mode, limit, why
    ramp: dict[str, str | None]  # rule, and why
    parameters: list[ParameterValues]
    warnings: list[CautionRow]
    next: list[str]  # commands


class CellRow(Entry):
    text: str  # as it is printed there, e.g. I^-1 L^(alpha-1)
    source: str


class RuleDocument(Document, schema="rule/1"):
    """``leaven show --rule NAME``."""

    rule: str
    source: str
    roles: dict[str, dict[str, CellRow]]  # by role and quantity
    shared: dict[str, CellRow]  # what all roles share
    letters: dict[str, str]


class BestTrial(Entry):
    loss: float  # nats a token
    interval: list[float]  # 95%
    recipe: str  # a file


class TuneDocument(Document, schema="tune/1"):
    """``leaven tune RECIPE --study DIR``; study.json in the study's folder has every trial."""

    best: BestTrial | None
    trials: int  # that have ended
    failed: int  # diverged or failed
    noise_floor: float | None  # nats, standard deviation between seeds
    next: list[str]  # commands


class TrainDocument(Document, schema="train/1"):
    """``leaven train RECIPE``."""

    loss: float | None  # validation, nats a token; null while the run is not finished
    tokens: int
    steps: int
    seconds: float
    mfu: float | None  # the median over the steps
    rollbacks: int
    bits_per_byte: float | None  # null if the tokenizer does not report bytes
    mfu_causal: float | None
    hfu: float | None
    mfu_convention: str | None
    unsaved: str | None  # why a stopped run could not be saved
    saved_tokens: int  # of its newest checkpoint
    noise_scale: float | None  # of the gradient, in tokens
    finished: bool  # false if the run was stopped
    next: list[str] = []  # commands


class SampleRow(Entry):
    text: str
    tokens: int
    ended: bool  # by an end of text


class SampleDocument(Document, schema="sample/1"):
    """``leaven sample RUN TEXT``."""

    run: str
    tokens: int  # of the checkpoint
    prompt: str
    samples: list[SampleRow]


class WeightsDocument(Document, schema="export-weights/1"):
    """``leaven export weights RUN DIR``."""

    path: str
    architecture: str
    tokens: int  # of the checkpoint
    next: list[str]  # commands


class LossRow(Entry):
    key: str
    value: Any
    why: str


class ConfigDocument(Document, schema="export-config/1"):
    """``leaven export config RECIPE --to TARGET``."""

    path: str
    lost: list[LossRow]  # what the target cannot express
    notes: list[str]
    next: list[str]  # commands


class ImportDocument(Document, schema="import-config/1"):
    """``leaven import config FILE --from SOURCE``."""

    path: str | None
    unknown: list[str]  # values that the source does not give
    unread: list[str]  # what no recipe holds
    recipe: dict[str, Any]
    next: list[str]  # commands


class ServeDocument(Document, schema="serve/1"):
    """``leaven serve``, printed when it starts."""

    url: str  # the address to open; it contains the token
    folders: list[str]  # the folders that it shows


class ReportDocument(Document, schema="report/1"):
    """``leaven report PATH``."""

    path: str


class DemoStage(Entry):
    name: str
    seconds: float


class DemoArm(Entry):
    key: str
    title: str
    run: str  # its folder
    loss: float | None = None  # nats per token; null if it diverged
    why: str = ""


class DemoCorpus(Entry):
    source: str
    bytes: int
    train_tokens: int
    validation_tokens: int
    vocab_size: int


class DemoDocument(Document, schema="demo/1"):
    """``leaven demo``."""

    report: str  # the page
    verdict: str
    arms: list[DemoArm]
    parts: list[DemoStage]
    text: DemoCorpus | None
    moved: dict[str, tuple[int, int]] = Field(
        default_factory=dict
    )  # of the small and the big run: params, width, ...
