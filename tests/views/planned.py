"""Plans of one recipe on different clusters, for the tests of their pages."""

from leaven.planning.plan import ClusterPlan, plan_recipe
from leaven.recipe.files import parse_recipe

RYE = """
name = "rye-7b"
[model]
n_layers = 32
d_model = 4096
n_heads = 32
n_kv_heads = 32
d_head = 128
d_ff = 11008
vocab_size = 32768
seq_len = 2048
[data]
tokens = 140_000_000_000
[batch]
tokens = 1_048_576
[hyperparameters]
lr = 0.004
init_std = 0.02
[precision]
compute = "bf16"
"""
WAYS = {
    "alone": ("8xH100-80GB", "dp=8,zero=3,mbs=1"),
    "1f1b": ("32xA100-80GB", "tp=2,pp=8,zero=1,mbs=1"),
    "interleaved": ("16xH100-80GB", "pp=4,zero=1,schedule=interleaved,stages_per_rank=2,mbs=1"),
    "zero-bubble": ("8xH100-80GB", "pp=4,schedule=zero-bubble,mbs=1"),
    "too large": ("8xA100-40GB", "dp=8,mbs=4"),
}


def planned(way: str) -> ClusterPlan:
    recipe = parse_recipe(RYE, "rye.toml")
    gpus, layout = WAYS[way]
    return plan_recipe(recipe, gpus, layout)
