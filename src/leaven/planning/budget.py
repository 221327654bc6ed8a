"""Find the model sizes and numbers of tokens that a cluster can train in a given time.

A scaling law gives the best number of parameters N for a budget of FLOPs. The FLOPs that a cluster delivers in the
given time depend on N, so N is found by iteration: N -> shape -> fastest layout -> FLOPs -> N.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from leaven.catalogue.laws import FRONTIERS
from leaven.catalogue.neighbours import neighbours
from leaven.catalogue.starter.batch import choose_batch
from leaven.catalogue.starter.draft import (
    LEAST_PARAMS,
    MOST_PARAMS,
    MOST_TOKENS,
    RunSize,
    StarterDraft,
    StarterRequest,
)
from leaven.catalogue.starter.shape import choose_shape
from leaven.catalogue.starter.starter import MOST_EPOCHS
from leaven.documents.planning import BudgetDocument, FittingSize, Price, RefusedRow, TimeFit
from leaven.errors import InputError
from leaven.planning.arrangement import Arrangement
from leaven.planning.calibration import CalibrationRecord, history
from leaven.planning.cost import cluster_cost
from leaven.planning.flops import CONVENTION, flops_per_token
from leaven.planning.hardware import Cluster, parse_cluster
from leaven.planning.layouts import Job, worth_compiling
from leaven.planning.plan import plan
from leaven.recipe.batch import Batch
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import format_quantity

# Tokens per parameter: Chinchilla's rule of thumb, and more for models that are cheap at inference (Llama 2 7B: 290,
# Llama 3 8B: 1,900).
RULE_OF_THUMB = 20
OVER_TRAINED = (RULE_OF_THUMB, 100, 500, 2000)
_SECONDS = {"h": 3_600, "d": 86_400, "w": 7 * 86_400}
_TIME = r"(?P<time>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(?P<unit>h|d|w)(?:ours?|rs?|ays?|eeks?|ks?)?"
_BUDGET = re.compile(rf"(?P<cluster>.+?)\s*[x×*,]\s*{_TIME}\s*", re.IGNORECASE)
_LEAST_FOR_TEXT = 250_000  # least parameters for a short text; a smaller model would be nearly all embedding
_FIRST_MFU = 0.4  # assumed before the first plan
_SAME = 0.05  # sizes within this share use one plan; a shape misses its requested size by up to 3% anyway
_STEPS = 4  # iterations at most


def parse_budget(text: str) -> tuple[Cluster, float]:
    """Parse text such as ``64xH100 x 14d`` into a cluster and seconds. Raise InputError for other text."""
    match = _BUDGET.fullmatch(text.strip())
    if match is None or not (seconds := _seconds(match)):
        raise InputError(
            f"--budget {text}: not a cluster and a time above 0 in h, d or w; write for example '64xH100-80GB x 14d'"
        )
    return parse_cluster(match["cluster"]), seconds


def _seconds(time: re.Match[str]) -> float:
    return float(time["time"]) * _SECONDS[time["unit"].lower()]


def budget(text: str, *, mfu: float | None = None, price: Price | None = None) -> BudgetDocument:
    """Return the model sizes and numbers of tokens that fit a budget such as ``64xH100 x 14d``.

    There is a row for each scaling law, and a row for each number of tokens per parameter in `OVER_TRAINED`.
    Impossible rows are in ``refused``, with the reason. With ``mfu``, the speed is this share of the dense peak, and
    no layout is planned.

    Raise InputError if the text is not a budget, ``mfu`` is not between 0 and 1, or no model fits.
    """
    cluster, seconds = parse_budget(text)
    if mfu is not None and not 0 < mfu < 1:
        raise InputError(
            f"--mfu {mfu:g}: not a share of the dense peak; give a number between 0 and 1, for example 0.4"
        )
    speeds = _Speeds(cluster, seconds, mfu)
    laws: dict[str, Callable[[float], float]] = {each.name: each.sizes.optimal_params for each in FRONTIERS}
    laws |= {f"{ratio:,} tokens a parameter": partial(_params_at, ratio) for ratio in OVER_TRAINED}
    rows, refused = [], []
    for law, size in sorted(laws.items(), key=lambda law: law[1](1e22)):  # nearly equal sizes share a plan
        try:
            rows.append(speeds.row(law, size))
        except InputError as error:
            refused.append(RefusedRow(law=law, why=str(error)))
    if not rows:
        raise InputError(f"--budget {text}: {refused[0].why}")
    rows.sort(key=lambda row: row.params, reverse=True)
    return BudgetDocument(
        cluster=str(cluster),
        nodes=cluster.nodes_text,
        gpus=cluster.gpus,
        note=cluster.accelerator.note,
        days=seconds / 86_400,
        cost=cluster_cost(cluster, seconds, price),
        flops_convention=CONVENTION,
        rows=rows,
        refused=refused,
    )


def size_for_time(
    cluster: Cluster,
    time: str,
    text_tokens: Callable[[int], int] | None,
    *,
    vocab: int | None = None,
    seq_len: int | None = None,
    on_fault: Callable[[str], None] = lambda fault: None,
) -> tuple[int, int, TimeFit]:
    """Return (parameters, tokens, details) of the largest model that trains on 20 tokens per parameter in ``time``.

    ``text_tokens`` returns the number of tokens of the text with a vocabulary of a given size. The text is read at
    most 4 times (`MOST_EPOCHS`), so a short one gives a smaller model.
    Earlier runs on the same accelerator correct the planned speed. For ``on_fault``, see
    :func:`leaven.planning.calibration.history`.
    Raise InputError if ``time`` is not a time such as ``3h``, or no model can be trained in it.
    """
    match = re.fullmatch(_TIME, time.strip(), re.IGNORECASE)
    if match is None or not (seconds := _seconds(match)):
        raise InputError(f"--time {time}: not a time in h, d or w; write for example 3h or 2d")
    speeds = _Speeds(cluster, seconds, records=history(on_fault), vocab=vocab, seq_len=seq_len)
    try:
        full = speeds.row("", partial(_params_at, RULE_OF_THUMB))
    except InputError as error:
        raise InputError(f"--time {time}: {error}") from None

    def sized(vocab_size: int) -> tuple[float, float, int | None, BudgetSpeed]:
        """Return (parameters, tokens, tokens in the text, speed) for a vocabulary of this size.

        The tokens in the text are None if there is no text, or if it is long enough for the size ``full``.
        """
        known = None if text_tokens is None else text_tokens(vocab_size)
        if known is None or full.tokens <= MOST_EPOCHS * known:
            return full.params, full.tokens, None, speeds.at(full.params, full.tokens)
        tokens = MOST_EPOCHS * known
        params = min(max(tokens / RULE_OF_THUMB, _LEAST_FOR_TEXT), full.params)
        return params, tokens, known, speeds.at(params, tokens)

    # A smaller model has a smaller vocabulary, with which a text has more tokens, enough for a larger model.
    # If no vocabulary fits its own count, take the largest: its count is the lowest.
    counted, vocab_size = list[int](), speeds.at(full.params, full.tokens).shape.vocab_size
    while vocab_size not in counted:
        counted.append(vocab_size)
        vocab_size = sized(vocab_size)[-1].shape.vocab_size
    params, tokens, short, speed = sized(max(counted[counted.index(vocab_size) :]))
    if short is not None:
        seconds = 6 * params * tokens / speed.flops
    fit = TimeFit(cluster=str(cluster), seconds=seconds, text_tokens=short)
    return round(params), int(float(f"{tokens:.3g}")), fit


def _params_at(ratio: int, flops: float) -> float:
    return math.sqrt(flops / 6 / ratio)


class BudgetSpeed(NamedTuple):
    """The speed at which the cluster trains one model shape."""

    shape: ModelShape
    batch_tokens: int
    flops: float  # FLOP/s of all GPUs together, counted as 6 x parameters x tokens per second
    mfu: float  # share of the dense peak, counting attention over all keys
    how: Arrangement | None  # the fastest layout; None if the user gave the MFU


@dataclass(frozen=True)
class _Speeds:
    cluster: Cluster
    seconds: float  # duration of training
    mfu: float | None = None  # the MFU that the user gave; None to plan a layout and compute its MFU
    records: Sequence[CalibrationRecord] = ()  # earlier runs, which correct the planned speeds
    vocab: int | None = None  # vocabulary size; None: chosen by model size
    seq_len: int | None = None  # sequence length; None: chosen by model size
    planned: dict[float, BudgetSpeed] = field(default_factory=dict)  # planned so far, by number of parameters

    def row(self, law: str, size: Callable[[float], float]) -> FittingSize:
        """Return the model size that the law ``size`` (from FLOPs to parameters) gives, and its training speed."""
        # Start from the speed of the last planned size, or from the given or usual share of the peak.
        last = next(reversed(self.planned.values()), None)
        peak = self.cluster.accelerator.peak_tflops * 1e12 * self.cluster.gpus
        flops = last.flops if last else (self.mfu or _FIRST_MFU) * peak
        for _ in range(_STEPS):
            params = size(flops * self.seconds)
            speed = self.at(params, flops * self.seconds / 6 / params)
            flops = speed.flops
            settled = size(flops * self.seconds)
            if abs(settled / params - 1) < _SAME / 2:
                break
        tokens = flops * self.seconds / 6 / settled
        return FittingSize(
            law=law,
            params=settled,
            tokens=tokens,
            tokens_per_param=tokens / settled,
            flops=6 * settled * tokens,
            days=self.seconds / 86_400,
            mfu=speed.mfu,
            tflops_per_gpu=speed.mfu * self.cluster.accelerator.peak_tflops,
            batch_tokens=speed.batch_tokens,
            shape=speed.shape.model_dump(mode="json") | {"params": speed.shape.params},
            layout=speed.how and speed.how.to_json(),
        )

    def at(self, params: float, tokens: float) -> BudgetSpeed:
        """Return the training speed of a model. A plan for a size within 5% is reused."""
        for planned, speed in self.planned.items():
            if abs(planned / params - 1) < _SAME:
                return speed
        cluster, size = self.cluster, (round(params), round(tokens))
        request = StarterRequest("budget", *size, vocab=self.vocab, seq_len=self.seq_len, gpus=cluster.gpus)
        if not LEAST_PARAMS <= request.params <= MOST_PARAMS or request.tokens > MOST_TOKENS:
            change = "increase" if request.params < LEAST_PARAMS else "reduce"
            params_text, tokens_text = map(format_quantity, size)
            raise InputError(
                f"{params_text} parameters on {tokens_text} tokens are outside the range that leaven plans; "
                f"{change} the time"
            )
        near = neighbours(request.params, request.tokens)
        shape = choose_shape(request, near)
        batch = choose_batch(StarterDraft(), RunSize(near, shape, request.tokens, request.gpus))
        if self.mfu is None:
            compute = "fp32" if cluster.accelerator.name == "cpu" else "bf16"
            found = plan(
                Job(shape, Batch(tokens=batch), cluster, compile=worth_compiling(shape, cluster)), request.tokens
            ).calibrated(self.records, compute)
            how, mfu, rate = found.chosen.arrangement, found.speed.mfu, found.speed.tokens_per_second
        else:
            how, mfu = None, self.mfu
            rate = mfu * cluster.accelerator.peak_tflops * 1e12 * cluster.gpus / flops_per_token(shape)
        self.planned[params] = BudgetSpeed(shape, batch, 6 * shape.params * rate, mfu, how)
        return self.planned[params]
