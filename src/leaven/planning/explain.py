"""Why not: what somebody asks about, against what was chosen, by part of the step and of the memory."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from leaven.planning.arrangement import Arrangement, layout_of, parse_keys, shape_refusal
from leaven.planning.layouts import EQUAL, USABLE, Candidate, Exploration, Job, explore
from leaven.planning.memory import GIB, Memory
from leaven.recipe.errors import InputError
from leaven.recipe.layout import Layout

# What each part of a step is to a person.
PARTS = {
    "compute": "compute",
    "tensor_parallel": "all-reduce",
    "pipeline": "transfers between stages",
    "bubble": "bubble",
    "data_parallel": "gradient exchange",
    "optimizer": "optimizer",
}
_N_NOT = 4
# What is slower by less is no reason.
_SLOWER = 0.03


@dataclass(frozen=True)
class Explanation:
    """What was asked, the best that has it, and one line that says why it is not the choice.

    ``found`` is None where nothing has it or nothing of that fits; then ``needs`` is the leanest of what does not
    fit, or None too.
    """

    asked: str
    chosen: Candidate
    found: Candidate | None
    needs: tuple[Arrangement, Memory] | None
    line: str

    @property
    def seconds(self) -> dict[str, tuple[float, float]]:
        """Seconds of a step by part: of what was asked, and of the choice."""
        return {} if self.found is None else _beside(vars(self.found.time), vars(self.chosen.time))

    @property
    def memory_gib(self) -> dict[str, tuple[float, float]]:
        memory = self.found.memory if self.found else self.needs[1] if self.needs else None
        return {} if memory is None else _beside(memory.parts_gib, self.chosen.memory.parts_gib)

    def to_json(self) -> dict[str, Any]:
        how = self.found.arrangement if self.found else self.needs[0] if self.needs else None
        return {
            "asked": self.asked,
            "line": self.line,
            "possible": how is not None,
            "fits": self.found is not None,
            "layout": how and how.to_json(),
            "step_seconds": self.found and self.found.time.step,
            "seconds": {part: {"asked": a, "chosen": c} for part, (a, c) in self.seconds.items()},
            "gib": {part: {"asked": a, "chosen": c} for part, (a, c) in self.memory_gib.items()},
        }


def explain(exploration: Exploration, chosen: Candidate, asked: str) -> Explanation:
    """What a part of a layout, ``tp=4`` or ``pp=8,recompute=full``, would be at its best, the rest being free.

    Raises:
        InputError: if what is asked is no part of a layout.
    """
    fixed = parse_keys(asked)
    if not fixed:
        raise InputError(f"explain {asked!r}: nothing is asked; write for example tp=4 or pp=8,recompute=full")
    micro_batch = fixed.pop("mbs", None)
    _require_values(asked, fixed)
    job = exploration.job if micro_batch is None else replace(exploration.job, micro_batch=micro_batch)
    notes = _unsearched(job, fixed)
    if job.by_leaven:  # what leaven does not train is only looked at when it is asked for
        fixed = {"cp": 1, "ep": 1} | fixed
    if fixed.get("zero", 0) > 1 and not {"pp", "schedule", "stages_per_rank"} & {*fixed}:
        fixed["pp"] = 1
    refusal = _impossible(exploration, fixed)
    if refusal is not None:
        return Explanation(asked, chosen, None, None, refusal.removeprefix(f"{asked}: "))
    seen = explore(job, fixed)
    if seen.fitting:
        found = seen.fitting[0]
        return Explanation(asked, chosen, found, None, _slower(found, chosen) + notes)
    if seen.too_large:
        return Explanation(asked, chosen, None, seen.too_large[0], _too_large(exploration, seen.too_large[0][1]))
    said = str(seen.refusal) if seen.refusal else f"no layout of {job.cluster.gpus:,} GPUs has that"
    if not fixed.keys() - {"cp", "ep", "compile"}:  # of the layout at hand, where its own degrees are asked for
        try:
            job.arrangements(chosen.arrangement.layout)
        except InputError as error:
            said = str(error)
    return Explanation(asked, chosen, None, None, said)


def not_lines(exploration: Exploration, chosen: Candidate) -> tuple[str, ...]:
    """The neighbours of the choice that are slower by more than 3% or do not fit, each with its reason.

    A neighbour has another value of one key, dp what is left, and the micro-batch that suits it. Where no such layout
    is possible, what else is another is named: ``pp 2 (with zero 1)``.
    """
    found: list[tuple[float, str]] = []
    for key in ("tp", "pp", "zero", "recompute"):
        own = chosen.arrangement.layout
        fitting: dict[Any, list[Candidate]] = {}
        for candidate in exploration.layouts:
            fitting.setdefault(getattr(candidate.arrangement.layout, key), []).append(candidate)
        too_large: dict[Any, list[tuple[Arrangement, Memory]]] = {}
        for how, memory in exploration.too_large:
            if how.layout.cp == how.layout.ep == 1 or not exploration.job.by_leaven:
                too_large.setdefault(getattr(how.layout, key), []).append((how, memory))
        for value in _neighbours(getattr(own, key), {*fitting, *too_large}):
            alike = [each for each in fitting.get(value, []) if not _others(each.arrangement.layout, own, key)]
            lean = [memory for how, memory in too_large.get(value, []) if not _others(how.layout, own, key)]
            if lean and not alike:
                found.append((float("inf"), f"{key} {value}: {_too_large(exploration, lean[0])}"))
            elif value in fitting:
                near = (alike or fitting[value])[0]
                others = _others(near.arrangement.layout, own, key)
                slower = near.time.step / chosen.time.step - 1
                if slower > _SLOWER:
                    what = f"{key} {value}" + (f" (with {', '.join(others)})" if others else "")
                    found.append((slower, f"{what}: {_reason(near, chosen)}"))
            else:
                found.append((float("inf"), f"{key} {value}: {_too_large(exploration, too_large[value][0][1])}"))
    return tuple(line for _, line in sorted(found)[:_N_NOT])


def _others(layout: Layout, own: Layout, key: str) -> list[str]:
    """What of a layout is another than in the choice beside one key and what follows from it."""
    follow = {"dp", "compile", key} | ({"schedule", "stages_per_rank"} if layout.pp == 1 else set())
    follow |= {"dp_replicate"} if layout.zero < 3 else set()
    mine, theirs = layout.model_dump(), own.model_dump()
    return [f"{name} {value}" for name, value in mine.items() if name not in follow and value != theirs[name]]


def _neighbours(own: Any, values: Iterable[Any]) -> list[Any]:
    """The next lower and the next higher number; of words all others."""
    others = [value for value in values if value != own]
    if isinstance(own, str):
        return others
    lower, higher = [n for n in others if n < own], [n for n in others if n > own]
    return [*([max(lower)] if lower else []), *([min(higher)] if higher else [])]


def _slower(found: Candidate, chosen: Candidate) -> str:
    if found.arrangement == chosen.arrangement:
        return "that is the choice"
    more = (found.memory.total - chosen.memory.total) / GIB
    memory = f"{abs(more):.1f} GiB {'more' if more > 0 else 'less'}"
    slower = found.time.step / chosen.time.step - 1
    if abs(slower) <= EQUAL:
        return f"as fast with {memory} ({found.arrangement})"
    if slower < 0:
        return f"{slower:+.1%} time, {memory}: faster ({found.arrangement})"
    return f"{slower:+.1%} time, {memory}: {_reason(found, chosen)} ({found.arrangement})"


def _reason(found: Candidate, chosen: Candidate) -> str:
    """The part of a step that grows most, and its share."""
    more = {
        part: found_s - chosen_s for part, (found_s, chosen_s) in _beside(vars(found.time), vars(chosen.time)).items()
    }
    part = max(more, key=more.__getitem__)
    share = vars(found.time)[part] / found.time.step
    if part == "bubble":
        m = found.arrangement.grad_accumulation
        return f"bubble {share:.0%} at {m} micro-batch{'' if m == 1 else 'es'}"
    if part == "compute":
        again = found.arrangement.layout.recompute, chosen.arrangement.layout.recompute
        what = "more compute" if again[0] in {"none", again[1]} else "more compute with recomputation"
        return f"{found.time.compute / chosen.time.compute - 1:.0%} {what}"
    return f"{PARTS.get(part, part.replace('_', ' '))} {share:.0%} of the step"


def _too_large(exploration: Exploration, memory: Memory) -> str:
    gib = exploration.job.cluster.accelerator.memory_gib
    return f"needs {memory.total / GIB:.1f} GiB, {USABLE * gib:.0f} of {gib:g} are counted on"


def _require_values(asked: str, fixed: dict[str, Any]) -> None:
    """Raise InputError for a value that no layout has, whatever the rest is."""
    for key, value in fixed.items():
        rest = {"dp": value} if key in {"ep", "dp_replicate"} else {}
        rest |= {"zero": 1} if key == "dp_replicate" else {"pp": 2} if key in {"schedule", "stages_per_rank"} else {}
        if (key == "stages_per_rank" and value > 1) or (key, value) == ("schedule", "interleaved"):
            rest |= {"schedule": "interleaved", "stages_per_rank": value if key == "stages_per_rank" else 2}
        layout_of(asked, rest | {key: value})


def _unsearched(job: Job, fixed: dict[str, Any]) -> str:
    """What of it is never the choice, on principle, as the end of a line."""
    left_out = []
    if fixed.get("tp", 1) > job.cluster.accelerator.node_size:
        left_out.append("tensor parallelism across nodes")
    if fixed.get("zero", 0) > 1 and fixed.get("pp", 1) > 1:
        left_out.append(f"ZeRO {fixed['zero']} with a pipeline")
    if fixed.get("schedule") == "zero-bubble":
        left_out.append("a zero-bubble schedule")
    said = f"; {' and '.join(left_out)} is not searched" if left_out else ""
    if job.by_leaven and max(fixed.get("cp", 1), fixed.get("ep", 1)) > 1:
        said += "; leaven plans and exports that and does not train with it"
    return said


def _impossible(exploration: Exploration, fixed: dict[str, Any]) -> str | None:
    """Why a model or a cluster has no layout of that, whatever the rest is."""
    job, degrees = exploration.job, {key: fixed[key] for key in ("tp", "pp", "cp", "ep", "dp") if key in fixed}
    tp, pp, cp, ep = (degrees.get(key, 1) for key in ("tp", "pp", "cp", "ep"))
    refusal = shape_refusal(job.model, Layout(dp=ep, tp=tp, pp=pp, cp=cp, ep=ep))
    if refusal is not None:
        return refusal
    product = tp * pp * cp * degrees.get("dp", 1)
    if job.cluster.gpus % product:
        return f"{job.cluster.gpus:,} GPUs do not divide by {product}"
    return None


def _beside(asked: dict[str, float], chosen: dict[str, float]) -> dict[str, tuple[float, float]]:
    return {part: (asked.get(part, 0.0), chosen.get(part, 0.0)) for part in {**asked, **chosen}}
