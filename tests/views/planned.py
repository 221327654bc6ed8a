"""Plans to make pages of."""

from leaven.planning.plan import ClusterPlan
from leaven.planning.published import plan_run

WAYS = {
    "alone": ("8xH100-80GB", "dp=8,zero=3,mbs=1"),
    "1f1b": ("32xA100-80GB", "tp=2,pp=8,zero=1,mbs=1"),
    "interleaved": ("16xH100-80GB", "pp=4,zero=1,schedule=interleaved,stages_per_rank=2,mbs=1"),
    "zero-bubble": ("8xH100-80GB", "pp=4,schedule=zero-bubble,mbs=1"),
    "too large": ("8xA100-40GB", "dp=8,mbs=4"),
}


def planned(way: str) -> ClusterPlan:
    return plan_run("llama1-7b", *WAYS[way])
