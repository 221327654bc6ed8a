"""The data of `leaven new`: the request, the evidence for a value, the unfinished recipe, and the result."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from leaven.catalogue.laws import main_laws
from leaven.catalogue.messages import parts, sentence
from leaven.catalogue.neighbours import Neighbours, Votes, middle, mixtures, nearest
from leaven.catalogue.runs import PublishedRun, find_run, load_runs
from leaven.catalogue.starter.proxy import TuningAdvice
from leaven.catalogue.terms import term
from leaven.documents.catalogue import LawRow
from leaven.documents.planning import ComparedRow, DerivationRow, NewRecipe, TimeFit
from leaven.errors import InputError
from leaven.recipe.batch import Batch, BatchSchedule
from leaven.recipe.recipe import Recipe, set_path
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import format_quantity, listed

LEAST_PARAMS, MOST_PARAMS = 100_000, 10**13
MOST_TOKENS = 10**15


@dataclass(frozen=True)
class StarterRequest:
    """The options of `leaven new`."""

    name: str
    params: int  # size of the model, with all experts
    tokens: int  # length of the run
    source: str = "python-stdlib"  # the training text
    vocab: int | None = None  # None: leaven chooses
    seq_len: int | None = None  # None: leaven chooses
    reference: str | None = None  # ``--from``: id of a published run whose values replace the votes of many runs
    gpus: int = 1  # number of GPUs over which the batch must divide
    proxy: int | None = None  # parameters of the proxy; None: leaven chooses; 0: no proxy
    text_tokens: Callable[[int], int] | None = None  # tokens of the text by size of the vocabulary, if known
    experts: tuple[int, int] | None = None  # number of experts in a layer, and how many of them a token uses

    @property
    def params_active(self) -> int:
        return used_params(self.params, self.experts)

    def validate(self) -> None:
        """Raise InputError if a count is out of range."""
        if not LEAST_PARAMS <= self.params <= MOST_PARAMS:
            largest = max(run.params_total for run in load_runs() if run.kind == "dense")
            beyond = (
                f"the largest published dense model has {format_quantity(largest)} parameters"
                if self.params > MOST_PARAMS
                else "a smaller model is nearly all vocabulary"
            )
            raise InputError(
                f"--params {self.params:,}: give {format_quantity(LEAST_PARAMS)} to {format_quantity(MOST_PARAMS)}; "
                f"{beyond}"
            )
        if not 0 < self.tokens <= MOST_TOKENS:
            raise InputError(f"--tokens {self.tokens:,}: give a count up to {format_quantity(MOST_TOKENS)}, e.g. 20B")
        for option, count, least in (("--vocab", self.vocab, 257), ("--seq-len", self.seq_len, 16)):
            if count is not None and count < least:
                raise InputError(f"{option} {count}: give {least} or more, or leave it out")
        if self.experts and self.experts[0] < 2:
            raise InputError(f"--experts {self.experts[0]}: give 2 or more, or leave out --experts and --active")
        if self.experts and not self.experts[1] < self.experts[0]:
            number, active = self.experts
            raise InputError(f"--active {active}: give fewer than --experts {number}")


def used_params(params: int, experts: tuple[int, int] | None) -> int:
    """Estimate how many of ``params`` parameters a token uses: all if ``experts`` is None (a dense model).

    ``experts`` is (experts of a layer, experts that a token uses). In each block, a token is assumed to use
    4 d_model^2 attention parameters and 3 w d_model expert parameters, where w is the total width of its experts.
    Published mixtures of similar size give w / d_model and the number of shared experts.
    """
    if experts is None:
        return params
    number, active = experts
    near = mixtures(round(3 * params / (1 + 2 * number / active)))  # first guess: ratio 8/3, no shared experts
    ratio: float = widths_of_experts(near).value
    votes = mixtures(near.params, experts).most("model.experts.shared")
    shared: int = votes.value if votes else 0
    return round(params * (4 + 3 * ratio) / (4 + 3 * ratio * (number + shared) / (active + shared)))


def widths_of_experts(near: Neighbours) -> Votes:
    """Return the neighbours' w / d_model and its weighted median. w is the total width of a token's experts."""
    return near.middle(near.values(attrgetter("expert_ratio")))


def find_reference(id: str) -> PublishedRun:
    """Return the published run that ``--from`` names, or raise InputError if it cannot be used."""
    run = find_run(id)
    lacks = _lacks(run)
    if lacks is None:
        return run
    others = nearest(run.params_active, run.tokens or 20 * run.params_active, limit=20)
    usable = [other.id for other, _ in others if _lacks(other) is None][:3]
    raise InputError(f"--from {id}: {lacks}; give a run of similar size: {listed(usable)}")


def _lacks(run: PublishedRun) -> str | None:
    """Return why ``--from`` cannot use a run, or None if it can."""
    schedule = run.schedule
    if run.kind == "vlm":
        return "a model with vision, but --from reads only models of text"
    if schedule is None or schedule.peak_lr is None:
        return "it publishes no learning rate"
    # Without the size of its steps, an lr of Muon has no meaning.
    unmatched = run.optimizer == "muon" and term(run, "hyperparameters.muon.match") is None
    if unmatched or not run.comparable_lr(("adam", "adamw", "muon")):
        how = schedule.parametrisation or run.optimizer or "an unknown optimizer"
        return f"its learning rate {schedule.peak_lr:g} is for {how} and cannot be used with plain AdamW or Muon"
    if run.batch_tokens is None or run.tokens is None:
        return "its batch or its number of tokens is not published, so its learning rate says little"
    unknown = run.aspect is None or (run.kind == "moe" and run.expert_ratio is None)
    return "its shape is not published" if unknown else None


@dataclass(frozen=True)
class RunSize:
    """A run's model and tokens, with the evidence for choosing the run's other values."""

    near: Neighbours  # the published runs nearest in size
    model: ModelShape
    tokens: int
    gpus: int = 1  # number of GPUs over which the batch must divide

    @property
    def reference(self) -> PublishedRun | None:
        return self.near.reference

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.model.params_active

    @cached_property
    def laws(self) -> list[LawRow]:
        return main_laws(self.model, self.tokens)

    def evidence(
        self, laws: Mapping[str, float], of_run: Callable[[PublishedRun], float | None], own: float | None
    ) -> "Evidence":
        """Return the values of one quantity by laws and published runs.

        Args:
            laws: the value of each law, by the law's name.
            of_run: returns the value of a published run, or None.
            own: the value of the run that ``--from`` names, if any. It is used instead of the values of other runs.
        """
        inside = sum(law.in_range is True for law in self.laws if law.law in laws)
        if own and self.reference:
            runs = Votes(own, {self.reference.id: own})
        else:
            runs = self.near.middle({run.id: value for run in self.near.runs if (value := of_run(run))})
        named = [f"{law.law}: {law.source}" for law in self.laws if law.law in laws]
        return Evidence(middle(laws), inside, runs, (*named, *self.near.sources(runs.by)))


@dataclass(frozen=True)
class Evidence:
    """A quantity's values from laws and published runs."""

    laws: Votes
    inside: int  # number of laws within their fitted range
    runs: Votes
    sources: tuple[str, ...]

    @property
    def weight(self) -> float:
        """Return the weight of the laws in :attr:`middle`: 1/2 if all are in their fitted ranges, 1/4 if none is."""
        return (1 + self.inside / len(self.laws.by)) / 4

    @property
    def middle(self) -> float:
        return math.exp(self.weight * math.log(self.laws.value) + (1 - self.weight) * math.log(self.runs.value))

    @property
    def spread(self) -> float:
        return max(self.laws.high, self.runs.high) / min(self.laws.low, self.runs.low)


def derivation_step(
    number: int,
    title: str,
    lines: Sequence[str],
    values: Mapping[str, Any] | None = None,
    sources: Sequence[str] = (),
) -> DerivationRow:
    """Return a step in the derivation of a recipe. ``values`` maps paths to values; ``lines`` are the reasons."""
    once = list(dict.fromkeys(sources))
    return DerivationRow(
        step=number, title=title, values=dict(values or {}), lines=list(lines), reason="; ".join(lines), sources=once
    )


@dataclass
class StarterDraft:
    """An unfinished starter recipe. Each value is decided once, with a reason from ``catalogue/messages.toml``."""

    reference: str | None = None  # id of the run that ``--from`` names
    document: dict[str, Any] = field(default_factory=dict)  # the recipe so far, as nested mappings
    why: dict[str, str] = field(default_factory=dict)  # the reason for each decided value, by path
    steps: list[DerivationRow] = field(default_factory=list)
    # Fields of the messages in the section "uncertain", such as ``spread`` (how much sources differ), by title.
    uncertain: dict[str, dict[str, float]] = field(default_factory=dict)
    # The values decided since the last step, by path, each with the fields of its message.
    _open: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def batches(self) -> BatchSchedule:
        return BatchSchedule(Batch.model_validate(self.document["batch"]).sizes)

    def decide(self, path: str, value: Any, message: str | None = None, **facts: Any) -> None:
        """Set the value at ``path``, and its reason: the template named ``message`` (by default, named ``path``),
        filled in with ``facts``."""
        set_path(self.document, path, value)
        self._open[path] = {"value": value, "reference": self.reference} | facts
        self.why[path] = sentence("reasons", message or path, self._open[path])

    def weigh(self, title: str, path: str, value: Any, evidence: Evidence, message: str, **facts: Any) -> None:
        """Set the value at ``path``, and add the step ``title`` (:meth:`step`) with the sources of ``evidence``.

        ``message`` names two templates, for the reason and for the step, filled in with ``evidence`` and ``facts``.
        """
        self.uncertain[title] = {"spread": evidence.spread}
        self.decide(path, value, message, **vars(evidence), weight=evidence.weight, **facts)
        self.step(title, evidence.sources, message)

    def step(self, title: str, sources: Sequence[str] = (), message: str | None = None, **facts: Any) -> None:
        """Add a step named ``title`` to :attr:`steps`, with all values decided since the previous step.

        The step's text is the template ``message`` or else ``title``, filled in with ``facts`` and the recipe so far.
        """
        known: dict[str, Any] = dict(self.document)
        for decided in reversed(self._open.values()):
            known |= decided
        lines = parts("steps", message or title, known | {"reference": self.reference} | facts)
        values = {path: decided["value"] for path, decided in self._open.items()}
        self.steps.append(derivation_step(len(self.steps) + 1, title, lines, values, sources))
        self._open = {}


@dataclass(frozen=True)
class StarterRecipes:
    """The recipes that ``leaven new`` writes, with the steps that derived them."""

    target: Recipe
    steps: tuple[DerivationRow, ...]  # how the target was derived
    tuning: TuningAdvice  # whether to tune a smaller model (a proxy) first
    proxy: Recipe | None = None
    compared: tuple[ComparedRow, ...] = ()  # values of the target compared with published runs
    # Vocabulary size and sequence length of the published run or tuned base whose values are used, if any.
    source: Mapping[str, int | None] = field(default_factory=dict)

    def document(self, path: Path, proxy_path: Path, fit: TimeFit | None = None) -> NewRecipe:
        """Return the result of ``leaven new``. ``fit`` is the planned training time if the user gave ``--time``."""
        return NewRecipe(
            path=str(path),
            proxy_path=str(proxy_path) if self.proxy else None,
            params=self.target.model.params,
            params_active=self.target.model.params_active,
            tokens=self.target.data.tokens,
            steps=list(self.steps),
            proxy=self.tuning.proxy,
            tuning=self.tuning.reason,
            compared=list(self.compared),
            fit=fit,
        )
