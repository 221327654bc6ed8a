"""Render the HTML page of ``leaven plan``: memory, time, pipeline, possible layouts and cost of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leaven.documents.planning import PlanDocument
from leaven.planning.accelerators import CONFIDENCE, Accelerator
from leaven.planning.arrangement import Arrangement, bubble, scheduled
from leaven.planning.explain import part_name
from leaven.planning.layouts import USABLE, Job
from leaven.planning.plan import ACCURACY, ACCURACY_OF_EXPERTS, ClusterPlan
from leaven.planning.schedule import timeline
from leaven.views import numbers, plan_charts
from leaven.views.charts import Figure
from leaven.views.render import render

# The chart of a pipeline shows 2 pp micro-batches for the start and end of a step, and this many in between.
STEADY = 4


@dataclass(frozen=True)
class FormField:
    name: str  # the key in the address of the page
    label: str
    example: str  # shown while the field is empty
    value: str


def plan_page(
    plan: ClusterPlan, document: PlanDocument, name: str, command: str, form: Sequence[FormField] = ()
) -> str:
    """Return the HTML page of a plan. ``command`` prints the plan; ``form`` is for the page in ``leaven serve``."""
    stages = [stage.parts for stage in document.stages]
    capacity = document.memory.capacity_gib
    levels = (capacity, USABLE * capacity)
    how, cluster = Arrangement.read(document.layout), plan.job.cluster
    charts: dict[str, Figure | None] = {"memory": plan_charts.memory(stages, *levels)}
    pipeline = _pipeline(how, plan.job, charts) if how.layout.pp > 1 else None
    chosen, fitting = plan.chosen.row(), [each.row() for each in plan.exploration.fitting]
    drawn = plan_charts.drawn_layouts(fitting, chosen)
    if fitting:
        charts["layouts"] = plan_charts.layouts(drawn, document.pareto, chosen, *levels)
    choices = [chosen, *document.alternatives]
    return render(
        "planner.html.j2" if form else "plan.html.j2",
        charts,
        kind="plan",
        title=name,
        form=form,
        document=document,
        params=plan.job.model.params,
        tokens=plan.tokens,
        accelerator=cluster.accelerator,
        candidates=fitting,
        command=command,
        costs=numbers.costs(document.cost),
        seconds=86_400 * document.days,
        arrangement=how,
        usable=USABLE,
        stages=stages,
        fullest=max(range(len(stages)), key=lambda rank: sum(stages[rank].values())),
        part_hues=plan_charts.part_hues(stages),
        times={part_name(part, how.layout.ep): s for part, s in document.time.items() if s},
        pipeline=pipeline,
        drawn=len(drawn),
        tensor_hues=plan_charts.tensor_hues(drawn),
        choices=choices,
        degrees=["dp", "tp", "pp", *(key for key in ("cp", "ep") if any(each.layout[key] > 1 for each in choices))],
        time_range="; ".join(numbers.published_range(document)),
        accuracy=ACCURACY if document.params == document.params_active else ACCURACY_OF_EXPERTS,
        sources=_sources(cluster.accelerator),
    )


def _pipeline(how: Arrangement, job: Job, charts: dict[str, Figure | None]) -> Mapping[str, Any]:
    """Add the chart ``passes`` to ``charts``, and return the template variables of the pipeline's section."""
    layout = how.layout
    m = scheduled(layout, how.grad_accumulation)
    drawn = min(m, scheduled(layout, 2 * layout.pp + STEADY))
    step, short = (
        timeline(job.model, replace(how, grad_accumulation=count), job.cluster, job.code) for count in (m, drawn)
    )
    charts["passes"] = plan_charts.passes(short, job.slower, layout.stages_per_rank)
    return {
        "step": step,
        "layout": layout,
        "micro_batches": m,
        "drawn": drawn,
        "ranks": len(plan_charts.drawn_ranks(layout.pp)),
        "bubble": bubble(m, layout.pp, layout.stages_per_rank),
        "kinds": {each.kind for each in step.ranks[-1]},
        "hues": plan_charts.HUES,
    }


def _sources(accelerator: Accelerator) -> str:
    groups: dict[str, list[str]] = {}
    for source in accelerator.sources:
        groups.setdefault(f"{source.text} ({CONFIDENCE[source.confidence]})", []).append(source.group)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in groups.items())
