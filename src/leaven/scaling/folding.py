"""Multipliers folded into the weights: the same function for a plain transformer, which has none."""

import math
from collections.abc import Mapping

from leaven.recipe.shape import BRANCH_ENDS, ModelShape
from leaven.scaling.table import ParameterTable


def folding(shape: ModelShape, table: ParameterTable) -> Mapping[str, float]:
    """Return the factors on weights that make a model without multipliers equivalent; missing names mean 1.

    A branch's multiplier goes into the matrix that ends it, the scale of the attention logits into the queries (into
    their norm's gain if they have one, since a norm would undo a change of the matrix), the multiplier of the logits
    into the unembedding, or into the final norm where the unembedding is the embedding as well.
    """
    rows = {row.name: row.multiplier for row in table.rows}
    places = {"norm.final": rows.pop("embedding.weight")} if shape.tied_embeddings else {}
    if not shape.tied_embeddings:
        places["unembedding"] = rows.pop("unembedding.weight")
    for layer in range(shape.n_layers):
        query = "norm.query" if shape.qk_norm else "attention.query"
        places[f"layers.{layer}.{query}"] = table.attention_scale / (1 / math.sqrt(shape.d_head))
        for end in BRANCH_ENDS:
            places[f"layers.{layer}.{end}"] = rows.pop(f"layers.{layer}.{end}.weight")
    assert all(multiplier == 1 for multiplier in rows.values()), "a multiplier that is folded nowhere"
    names = {parameter.name for parameter in shape.parameters()}
    both = {f"{place}.{kind}": factor for place, factor in places.items() for kind in ("weight", "bias")}
    return {name: factor for name, factor in both.items() if name in names and factor != 1}
