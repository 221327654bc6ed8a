"""The search for a layout: everything the model, the batch and the memory allow, the fastest first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from leaven.planning.arrangement import Arrangement, arrangements, tensor_degrees
from leaven.planning.hardware import Cluster
from leaven.planning.memory import GIB, LEAVEN_BF16, Implementation, Memory, worst_stage
from leaven.planning.timing import StepTime, step_time
from leaven.recipe.errors import InputError
from leaven.recipe.layout import Layout, Recompute
from leaven.recipe.shape import ModelShape

# The count is 9% low on average and 16% at worst on 28 measured rows of BLOOM's layout search.
USABLE = 0.85
# Tokens of one forward beyond which a larger micro-batch gains nothing; below, launch latency speaks for it.
_ENOUGH_TOKENS = 8192
# A flash kernel computes the attention core again anyway, so "selective" saves nothing and is not searched.
_RECOMPUTE: tuple[Recompute, ...] = ("none", "full")


@dataclass(frozen=True)
class Candidate:
    """An arrangement with what it needs and how long it takes."""

    arrangement: Arrangement
    memory: Memory
    time: StepTime

    def fits(self, cluster: Cluster) -> bool:
        return self.memory.total <= USABLE * cluster.accelerator.memory_gib * GIB


def evaluate(
    shape: ModelShape, arrangement: Arrangement, cluster: Cluster, code: Implementation = LEAVEN_BF16
) -> Candidate:
    """Memory and time of one arrangement."""
    return Candidate(arrangement, worst_stage(shape, arrangement, code), step_time(shape, arrangement, cluster, code))


def layouts(shape: ModelShape, cluster: Cluster) -> Iterator[Layout]:
    """Every layout of the cluster worth a look: tensor parallelism inside a node, ZeRO 2 and 3 without pipeline."""
    gpus, node = cluster.gpus, cluster.accelerator.node_size
    for tp in tensor_degrees(shape):
        if tp > node or gpus % tp:
            continue
        for pp in (degree for degree in range(1, min(shape.n_layers, gpus // tp) + 1) if gpus // tp % degree == 0):
            dp = gpus // tp // pp
            for zero in (0,) if dp == 1 else (0, 1) if pp > 1 else (0, 1, 2, 3):
                for recompute in _RECOMPUTE:
                    yield Layout(dp=dp, tp=tp, pp=pp, zero=zero, recompute=recompute)


def search(
    shape: ModelShape,
    batch_tokens: int,
    cluster: Cluster,
    micro_batch: int | None = None,
    *,
    code: Implementation = LEAVEN_BF16,
    smallest_tokens: int | None = None,
) -> list[Candidate]:
    """The layouts that fit, each with its best micro-batch, the best first. ``smallest_tokens``: where a ramp begins.

    Raises:
        InputError: if nothing fits, or the batch divides over no layout; says what would work.
    """

    def found(on: Cluster) -> list[Candidate]:
        return _candidates(shape, batch_tokens, on, micro_batch, code=code, smallest_tokens=smallest_tokens)

    candidates = found(cluster)
    fitting = [candidate for candidate in candidates if candidate.fits(cluster)]
    if not fitting:
        raise InputError(_nothing_fits(candidates, cluster, found))
    best_of_layout: dict[Layout, Candidate] = {}
    for candidate in ranked(shape, fitting):
        best_of_layout.setdefault(candidate.arrangement.layout, candidate)
    return list(best_of_layout.values())


def ranked(shape: ModelShape, candidates: list[Candidate]) -> list[Candidate]:
    """The fastest first, times being equal to three digits.

    Then the lower ZeRO stage wins, the micro-batch nearer to 8,192 tokens from below (launch latency, which is not
    in the times, is on its side), and less memory.
    """

    def rank(candidate: Candidate) -> tuple[float, int, int, float]:
        how = candidate.arrangement
        tokens = min(how.micro_batch * shape.seq_len, _ENOUGH_TOKENS)
        return (float(f"{candidate.time.step:.3g}"), how.layout.zero, -tokens, candidate.memory.total)

    return sorted(candidates, key=rank)


def _candidates(
    shape: ModelShape,
    batch_tokens: int,
    cluster: Cluster,
    micro_batch: int | None,
    *,
    code: Implementation,
    smallest_tokens: int | None,
) -> list[Candidate]:
    found: list[Candidate] = []
    refused: InputError | None = None
    for layout in layouts(shape, cluster):
        try:
            possible = arrangements(shape, layout, batch_tokens, micro_batch, smallest_tokens)
            found += [evaluate(shape, how, cluster, code) for how in possible]
        except InputError as error:  # this layout cannot cut the batch; another may
            refused = refused or error
    if not found:
        raise refused or InputError(f"no layout of {shape.n_layers} layers fills {cluster}; try fewer GPUs")
    return found


def _nothing_fits(candidates: list[Candidate], cluster: Cluster, retry: Callable[[Cluster], list[Candidate]]) -> str:
    """One line: what the leanest layout needs, and how many GPUs would do."""
    least = min(candidates, key=lambda candidate: candidate.memory.total)
    message = (
        f"nothing fits: the leanest layout ({least.arrangement}) needs {least.memory.total / GIB:.1f} GiB of "
        f"{cluster.accelerator.memory_gib:g} on each GPU"
    )
    for doublings in range(1, 11):
        bigger = Cluster(cluster.gpus << doublings, cluster.accelerator)
        try:
            if any(candidate.fits(bigger) for candidate in retry(bigger)):
                return f"{message}; {bigger} would do"
        except InputError:  # more GPUs than the batch has sequences
            break
    return f"{message}; more GPUs do not help this batch: take a larger accelerator or a shorter seq_len"
