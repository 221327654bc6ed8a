"""Render the HTML page of ``leaven plan``: memory, time, possible layouts and cost of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from leaven.documents.planning import PlanDocument
from leaven.planning.accelerators import CONFIDENCE, Accelerator
from leaven.planning.arrangement import Arrangement
from leaven.planning.explain import part_name
from leaven.planning.layouts import USABLE
from leaven.planning.plan import ACCURACY, ACCURACY_OF_EXPERTS, ClusterPlan
from leaven.views import numbers, plan_charts
from leaven.views.charts import Figure
from leaven.views.render import render


@dataclass(frozen=True)
class FormField:
    """An input field of the planner's form in ``leaven serve``."""

    name: str  # the key in the address of the page
    label: str
    example: str  # shown while the field is empty
    value: str


def plan_page(
    plan: ClusterPlan, document: PlanDocument, name: str, command: str, form: Sequence[FormField] = ()
) -> str:
    """Return the HTML page of a plan. ``document`` is the document of ``plan``.

    ``name`` is the title, and ``command`` prints the plan. ``form`` has the input fields that ``leaven serve`` shows.
    """
    stages = [stage.parts for stage in document.stages]
    capacity = document.memory.capacity_gib
    levels = (capacity, USABLE * capacity)
    how, cluster = Arrangement.read(document.layout), plan.job.cluster
    charts: dict[str, Figure | None] = {"memory": plan_charts.memory(stages, *levels)}
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
        drawn=len(drawn),
        tensor_hues=plan_charts.tensor_hues(drawn),
        choices=choices,
        degrees=["dp", "tp", "pp", *(key for key in ("cp", "ep") if any(each.layout[key] > 1 for each in choices))],
        time_range="; ".join(numbers.published_range(document)),
        accuracy=ACCURACY if document.params == document.params_active else ACCURACY_OF_EXPERTS,
        sources=_sources(cluster.accelerator),
    )


def _sources(accelerator: Accelerator) -> str:
    groups: dict[str, list[str]] = {}
    for source in accelerator.sources:
        groups.setdefault(f"{source.text} ({CONFIDENCE[source.confidence]})", []).append(source.group)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in groups.items())
