"""Explain why another layout was not chosen, and what to change if no layout fits."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from leaven.documents.planning import Comparison, Explanation
from leaven.errors import InputError
from leaven.planning.accelerators import accelerators
from leaven.planning.arrangement import parse_keys, shape_refusal, tensor_degrees, written
from leaven.planning.hardware import Cluster, parse_cluster
from leaven.planning.layouts import EQUAL, USABLE, Exploration, Job, LayoutCandidate, explore, in_a_node, layouts
from leaven.planning.memory import GIB
from leaven.recipe.layout import Layout
from leaven.recipe.shape import ModelShape

PARTS = {
    "compute": "compute",
    "tensor_parallel": "all-reduce",
    "pipeline": "transfers between stages",
    "bubble": "bubble",
    "data_parallel": "gradient exchange",
    "optimizer": "optimizer",
    "host": "waiting for the host",
}

_N_NOT = 4  # neighbours of the chosen layout that are listed at most
_SLOWER = 0.03  # a neighbour that fits into memory is listed if slower by more than this share
# If nothing fits into memory, these multiples of the number of GPUs are tried.
_MORE = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)
_TRIED = 64  # smaller numbers of GPUs that are tried if no layout divides the batch over the GPUs


def part_name(part: str, ep: int = 1) -> str:
    """Return the name that messages use for a part of a step. ``ep`` is the number of expert-parallel ranks."""
    return "exchange in blocks" if part == "tensor_parallel" and ep > 1 else PARTS[part]


def explain(exploration: Exploration, chosen: LayoutCandidate, asked: str) -> Explanation:
    """Compare the chosen layout with the best layout that has the values ``asked``, such as ``pp=8,zero=1``.

    If no such layout fits, compare the one with the least memory. If none exists, the field ``line`` of the result
    says why. Raise InputError if ``asked`` is empty, or has a wrong key or value.
    """
    fixed = parse_keys(asked)
    if not fixed:
        raise InputError(f"--explain {asked!r} is empty; write for example tp=4 or pp=8,recompute=full")
    micro_batch = fixed.pop("mbs", None)
    job = exploration.job if micro_batch is None else exploration.job.with_micro_batch(micro_batch)
    notes = _unsearched(job, fixed)
    if job.by_leaven:  # layouts that leaven cannot train are searched on request only
        fixed = {"cp": 1} | fixed
    if fixed.get("zero", 0) > 1 and not {"pp", "schedule", "stages_per_rank"} & {*fixed}:
        fixed["pp"] = 1
    found, line = None, _refusal(job, fixed)
    if line is None:
        seen = explore(job, fixed)
        found = next(iter((*seen.fitting, *seen.too_large)), None)
        if found is None:
            line = str(seen.refusal or f"no layout of {job.cluster.gpus:,} GPUs has these values")
            if fixed.keys() <= {"cp", "ep", "compile"}:
                try:  # if only the micro-batch is impossible, explain that for the chosen layout
                    job.arrangements(chosen.arrangement.layout)
                except InputError as error:
                    line = str(error)
        else:
            line = _against_chosen(found, chosen) + notes if found.fits else memory_and_limit(found)
    step = found.time if found and found.fits else None

    def side_by_side(own: dict[str, float], other: dict[str, float]) -> dict[str, Comparison]:
        return {part: Comparison(asked=own[part], chosen=other[part]) for part in own}

    return Explanation(
        asked=asked,
        line=line.removeprefix(f"{asked}: "),
        possible=found is not None,
        fits=step is not None,
        layout=found and found.arrangement.to_json(),
        step_seconds=step and step.step,
        seconds=side_by_side(vars(step), vars(chosen.time)) if step else {},
        gib=side_by_side(found.memory.parts_gib, chosen.memory.parts_gib) if found else {},
    )


def _unsearched(job: Job, fixed: dict[str, Any]) -> str:
    """Return notes about the values ``fixed`` that the search leaves out or leaven cannot train with, or ""."""
    zero, schedule = fixed.get("zero", 0), fixed.get("schedule")
    left_out = {
        "tensor parallelism across nodes": fixed.get("tp", 1) > job.cluster.accelerator.node_size,
        f"ZeRO {zero} with a pipeline": zero > 1 and fixed.get("pp", 1) > 1,
        f"a {schedule} schedule": schedule in {"gpipe", "zero-bubble"},
    }
    names = " and ".join(name for name, asked in left_out.items() if asked)
    notes = f"; the search leaves out {names}" if names else ""
    if job.by_leaven and fixed.get("cp", 1) > 1:
        notes += "; leaven can plan and export this but cannot train with it"
    return notes


def _refusal(job: Job, fixed: dict[str, Any]) -> str | None:
    tp, pp, cp, ep = (fixed.get(key, 1) for key in ("tp", "pp", "cp", "ep"))
    ranks = tp * pp * cp * fixed.get("dp", 1)
    refusal = shape_refusal(job.model, Layout(dp=ep, tp=tp, pp=pp, cp=cp, ep=ep))
    if refusal is None and job.cluster.gpus % ranks:
        return f"{job.cluster.gpus:,} GPUs are not divisible by {ranks}"
    return refusal


def not_lines(exploration: Exploration, chosen: LayoutCandidate) -> tuple[str, ...]:
    """Return at most four lines that say why layouts similar to the chosen one were not chosen.

    A similar layout has the next lower or higher tp, pp or zero, or a different recompute. ``pp 2 (with zero 1)`` is
    a layout with pp 2 that also needs zero 1. A layout that fits has no line if it is at most 3% slower.
    """
    own = chosen.arrangement.layout
    found: list[tuple[float, str]] = []
    for key in ("tp", "pp", "zero", "recompute"):
        by_value: dict[Any, list[LayoutCandidate]] = {}
        for candidate in (*exploration.layouts, *exploration.misfits):
            by_value.setdefault(getattr(candidate.arrangement.layout, key), []).append(candidate)
        for value in _neighbours(getattr(own, key), by_value):
            alike = (one for one in by_value[value] if not _others(one.arrangement.layout, own, key))
            near = next(alike, by_value[value][0])
            slower = near.time.step / chosen.time.step - 1
            if not near.fits:
                found.append((float("inf"), f"{key} {value}: {memory_and_limit(near)}"))
            elif slower > _SLOWER:
                others = ", ".join(_others(near.arrangement.layout, own, key))
                what = f"{key} {value}" + (f" (with {others})" if others else "")
                found.append((slower, f"{what}: {_reason(near, chosen)}"))
    return tuple(line for _, line in sorted(found)[:_N_NOT])


def _neighbours(own: Any, values: Iterable[Any]) -> list[Any]:
    """Return the nearest of the ``values`` below and above ``own``. For text, return all other values."""
    if isinstance(own, str):
        return [value for value in values if value != own]
    lower, higher = [n for n in values if n < own], [n for n in values if n > own]
    return [*([max(lower)] if lower else []), *([min(higher)] if higher else [])]


def _others(layout: Layout, own: Layout, key: str) -> list[str]:
    """Return the settings of ``layout``, such as ``zero 1``, that differ from ``own``, without ``key`` and without
    settings that follow from it or from others."""
    follow = {"dp", "compile", key} | ({"schedule", "stages_per_rank"} if layout.pp == 1 else set())
    follow |= {"dp_replicate"} if layout.zero < 3 else set()
    return [f"{name} {value}" for name, value in layout if name not in follow and value != getattr(own, name)]


def _against_chosen(found: LayoutCandidate, chosen: LayoutCandidate) -> str:
    if found.arrangement == chosen.arrangement:
        return "this is the chosen layout"
    more = (found.memory.total - chosen.memory.total) / GIB
    memory = f"{abs(more):.1f} GiB {'more' if more > 0 else 'less'}"
    slower = found.time.step / chosen.time.step - 1
    if abs(slower) <= EQUAL:
        return f"as fast with {memory} ({found.arrangement})"
    reason = "faster" if slower < 0 else _reason(found, chosen)
    return f"{slower:+.1%} time, {memory}: {reason} ({found.arrangement})"


def _reason(found: LayoutCandidate, chosen: LayoutCandidate) -> str:
    """Return which part of a step makes a layout slower than the chosen layout."""
    more = {part: seconds - vars(chosen.time)[part] for part, seconds in vars(found.time).items()}
    part = max(more, key=more.__getitem__)
    share = vars(found.time)[part] / found.time.step
    if part == "bubble":
        m = found.arrangement.grad_accumulation
        return f"bubble {share:.0%} at {m} micro-batch{'' if m == 1 else 'es'}"
    if part == "compute":
        again = found.arrangement.layout.recompute
        how = "" if again in {"none", chosen.arrangement.layout.recompute} else " with recomputation"
        return f"{found.time.compute / chosen.time.compute - 1:.0%} more compute{how}"
    return f"{part_name(part, found.arrangement.layout.ep)} {share:.0%} of the step"


def memory_and_limit(candidate: LayoutCandidate) -> str:
    """Return text such as ``needs 75.8 GiB, limit 68 of 80 GiB (85%)``."""
    gib = candidate.job.cluster.accelerator.memory_gib
    return f"needs {candidate.memory.total / GIB:.1f} GiB, limit {USABLE * gib:.0f} of {gib:g} GiB ({USABLE:.0%})"


def no_layout(seen: Exploration) -> InputError:
    job, beyond = seen.job, seen.untrained
    if seen.misfits:
        message = _nothing_fits(seen.misfits[0])
    elif fewer := _fewer_gpus(job):
        size = f" in micro-batches of {job.micro_batch}" if job.micro_batch else ""
        message = (
            f"no layout splits {job.model.n_layers} layers and a batch of {job.batch.tokens // job.model.seq_len:,} "
            f"sequences{size} over {job.cluster}; {fewer:,} GPUs would work"
        )
    else:
        message = str(
            seen.refusal or f"no layout splits {job.model.n_layers} layers over {job.cluster}; use fewer GPUs"
        )
    if job.micro_batch and any_fits(job.with_micro_batch("auto")):
        message += "; --set batch.micro_batch=auto would work"
    if beyond is not None:
        message += f"; leaven can plan and export, but not train, --layout {written(beyond.arrangement.layout)}"
    return InputError(message)


def _nothing_fits(least: LayoutCandidate) -> str:
    job, model = least.job, least.job.model
    times = () if job.cluster.accelerator.name == "cpu" else _MORE  # a cpu is always a single process
    larger = (_of_gpus(job.cluster, job.cluster.gpus * n) for n in times)
    more = next((cluster for cluster in larger if any_fits(replace(job, cluster=cluster))), None)
    would = [f"{more} would work"] if more else []
    if isinstance(model, ModelShape) and model.vocab_size % 128:
        padded = model.model_copy(update={"vocab_size": -(-model.vocab_size // 128) * 128})
        if any_fits(replace(job, model=padded)):
            vocab = f"a vocabulary of {padded.vocab_size:,} instead of {model.vocab_size:,}"
            would.append(f"{vocab} would fit, since tp divides it")
    if not would:
        would = ["use an accelerator with more memory or a shorter seq_len"]
    return (
        f"nothing fits: even the layout with the least memory ({least.arrangement}) {memory_and_limit(least)} on "
        f"each GPU; {'; '.join(would)}"
    )


def any_fits(job: Job) -> bool:
    """Return whether any allowed layout with one stage per pipeline rank fits into memory."""
    fixed = {"stages_per_rank": 1} | ({"cp": 1} if job.by_leaven else {})
    for layout in reversed([*layouts(job, fixed)]):  # the last layouts need the least memory
        try:
            smallest = job.arrangements(layout)[0]  # larger micro-batches need more memory
        except InputError:
            continue
        if LayoutCandidate(job, smallest).fits:
            return True
    return False


def _of_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """Return a cluster of ``gpus`` GPUs of the same kind. A node size that the user gave stays the same."""
    name = cluster.accelerator.name
    if name in accelerators() and str(cluster) == f"{cluster.gpus}x{name}":
        nodes = parse_cluster(f"{gpus}x{name}").accelerator.node_size
        return Cluster(gpus, replace(cluster.accelerator, node_size=nodes))
    return replace(cluster, gpus=gpus)


def _fewer_gpus(job: Job) -> int | None:
    """Try up to 64 smaller numbers of GPUs. Return the largest on which a layout fits, or None."""
    model, node = job.model, job.cluster.accelerator.node_size
    sequences, rest = divmod(job.batch.tokens // model.seq_len, job.micro_batch or 1)
    counts = {
        dp * tp * pp
        for dp in range(1, 0 if rest else sequences + 1)
        if sequences % dp == 0
        for pp in range(1, min(model.n_layers, sequences // dp) + 1)
        for tp in tensor_degrees(model)
        if in_a_node(tp, dp * tp * pp, node)
    }
    fewer = sorted((count for count in counts if count < job.cluster.gpus), reverse=True)[:_TRIED]
    return next((n for n in fewer if any_fits(replace(job, cluster=_of_gpus(job.cluster, n)))), None)


def smallest_change(exploration: Exploration, chosen: LayoutCandidate) -> str:
    """Return text like ``; zero=1 would fit in 61.0 GiB`` for the fitting layout nearest to ``chosen``, or ""."""

    def changes(other: LayoutCandidate) -> list[str]:
        before, after = (dict(each.arrangement.layout, mbs=each.arrangement.micro_batch) for each in (chosen, other))
        return [f"{key}={value}" for key, value in after.items() if key != "compile" and value != before[key]]

    if not exploration.layouts:
        return ""
    nearest = min(exploration.layouts, key=lambda other: len(changes(other)))
    return f"; {','.join(changes(nearest))} would fit in {nearest.memory.total / GIB:.1f} GiB"
