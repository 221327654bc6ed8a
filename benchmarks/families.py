"""Checks of model families: which checks pass on models of the transformers library under leaven.parametrize, and
which find planted faults.

    python -m benchmarks.families            # prints the table, a few minutes on an idle core
    python -m benchmarks.families --page     # also writes it to docs/concepts/checks.md

The models are small, and are built from configurations without downloads. They are trained on made-up text. A
family passes if `leaven check coordinates` and `leaven check gradients` pass on it, over width and depth, and if all
planted faults are found. A check finds a fault if a row fails with it that does not fail in the control, which is the
same check without the fault. The faults:

- *multiplier before the norm*: the multiplier of a branch has no effect, as before a norm on the branch's output; in
  a family without such norms, it is left out;
- *readout*: the lr of the unembedding does not fall with the width; with tied embeddings, the logits are not divided
  by the width;
- *router*: the lr of the routers does not fall with the width;
- *experts*: lr and initial variance of the experts' last matrices do not fall with the width, as if their fan in were
  the number of experts.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import leaven
from leaven.documents.checks import CheckDocument
from leaven.interop.multipliers import ScaleOutput
from leaven.recipe.shape import Role
from leaven.scaling.table import ParameterRow
from leaven.verification.coordinates import CoordinateCheck
from leaven.verification.foreign import MADE_UP, foreign
from leaven.verification.gradients import GradientCheck
from leaven.verification.model_instance import RunScale

PAGE = Path(__file__).parents[1] / "docs/concepts/checks.md"
BEGIN, END = "<!-- benchmarks.families -->", "<!-- end of benchmarks.families -->"
WIDTH, DEPTH, HEAD = 64, 2, 16  # of the base
WIDTHS, DEPTHS = (64, 128, 256), (2, 4, 8)
SIZES = {"width": (WIDTHS, (DEPTH,)), "depth": ((WIDTH,), DEPTHS)}  # widths and depths of a check along one axis
FAULT_SEEDS = (1, 3)  # seeds of a check with a fault and of its control; with one seed, a row may fail in both
VOCABULARY = 256
CHECKS: dict[str, type[CoordinateCheck | GradientCheck]] = {
    "coordinates": CoordinateCheck,
    "gradients": GradientCheck,
}
FAULTS = ("multiplier", "readout")
FAULTS_OF_EXPERTS = {"router": "mlp.router", "experts": "mlp.experts.out"}
Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """A family of models of the transformers library."""

    title: str
    name: str  # of its classes: nameConfig and nameForCausalLM
    has: str  # what its blocks have, for the table
    config: dict[str, Any] = field(default_factory=dict)  # more keys of the configuration
    shares: dict[str, float] = field(default_factory=dict)  # keys whose values are shares of the width
    normed: bool = False  # whether branches end in a norm
    tied: bool = False  # whether embedding and unembedding are tied
    experts_residual: float = 1.0  # multiplier of the experts' branch, where it would start smaller than one MLP's

    @property
    def faults(self) -> tuple[str, ...]:
        """The faults that can be planted in this family."""
        return (*FAULTS, *FAULTS_OF_EXPERTS) if "num_experts_per_tok" in self.config else FAULTS

    def model(self, width: int, depth: int) -> nn.Module:
        import transformers

        sizes: dict[str, Any] = {
            "hidden_size": width,
            "num_hidden_layers": depth,
            "num_attention_heads": width // HEAD,
            "intermediate_size": 2 * width,
            "num_key_value_heads": width // HEAD,
            "head_dim": HEAD,
            "max_position_embeddings": 64,
            "sliding_window": 16,
        }
        if self.name == "GPTJ":
            sizes = {"n_embd": width, "n_layer": depth, "n_head": width // HEAD, "n_positions": 64, "rotary_dim": 8}
        if self.name in {"Phi", "DeepseekV3"}:
            del sizes["head_dim"], sizes["sliding_window"]
        text = self.name if self.name != "Gemma3" else "Gemma3Text"
        shares = {key: round(share * width) for key, share in self.shares.items()}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        common = {"vocab_size": VOCABULARY, "tie_word_embeddings": self.tied, "use_cache": False}
        config = getattr(transformers, f"{text}Config")(**sizes | tokens | common | self.config | shares)
        model: nn.Module = getattr(transformers, f"{self.name}ForCausalLM")(config)
        return model


FAMILIES = {
    "olmo2": Family("OLMo 2", "Olmo2", "norms on branch outputs, QK-norm over all heads", normed=True),
    "olmo3": Family("OLMo 3", "Olmo3", "as OLMo 2; windows, every 4th layer global", normed=True),
    "gemma2": Family("Gemma 2", "Gemma2", "sandwich norms, soft caps, windows, tied", normed=True, tied=True),
    "gemma3": Family(
        "Gemma 3", "Gemma3", "sandwich norms, QK-norm, windows, every 6th layer global, tied", normed=True, tied=True
    ),
    "phi": Family("Phi", "Phi", "parallel branches, partial rotary, biases"),
    "gptj": Family("GPT-J", "GPTJ", "parallel branches, partial rotary, biases in the MLP"),
    "cohere": Family("Command R", "Cohere", "parallel branches, tied", {"logit_scale": 1.0}, tied=True),
    "qwen3": Family("Qwen3", "Qwen3", "norms before branches, QK-norm"),
    "mistral": Family("Mistral", "Mistral", "norms before branches, windows"),
    "mixtral": Family("Mixtral", "Mixtral", "2 of 4 experts", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3moe": Family(
        "Qwen3-MoE",
        "Qwen3Moe",
        "2 of 8 experts, QK-norm",
        {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
        {"moe_intermediate_size": 1.0},
        experts_residual=1.4,  # two of them add up to 1 / sqrt(2)
    ),
    "olmoe": Family(
        "OLMoE",
        "Olmoe",
        "2 of 8 experts, weights not normalised, QK-norm over all heads",
        {"num_experts": 8, "num_experts_per_tok": 2},
        {"intermediate_size": 1.0},
        experts_residual=4.0,  # their weights add up to 2 / 8
    ),
    "deepseek3": Family(
        "DeepSeek-V3",
        "DeepseekV3",
        "latent attention, 2 of 8 experts by sigmoids, a shared expert",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 0}
        | {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
        | {"qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 16},
        {"moe_intermediate_size": 1.0, "q_lora_rank": 0.5, "kv_lora_rank": 0.25},
    ),
}


def factory(  # noqa: PLR0917 (the first three are bound)
    family: Family, check: str, fault: str, width: int, depth: int, seed: int = 0
) -> tuple[nn.Module, Groups]:
    """Return a model and its AdamW groups, with the initial values that leaven's own models have in a check."""
    of = CHECKS[check]
    start = of.start_normed if family.normed else of.start
    base, std = family.model(WIDTH, DEPTH), start.hidden * WIDTH**-0.5
    model = family.model(width, depth)
    rows = float(getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0))  # type: ignore[operator]
    scale = rows * (WIDTH / width) ** 0.5 if rows != 1 else 1.0  # the embedding's factor in the base
    routed = {
        "mlp.router": {"init_std": 1 / WIDTH / std},
        "mlp.experts.out": {"residual": family.experts_residual},
    }
    hyperparameters = {
        "lr": 0.01,
        "init_std": std,
        "residual": start.residual,
        "modules": {
            "embedding": {"init_std": 1 / std / scale, "lr": start.embedding_lr / scale},
            **({} if family.tied else {"unembedding": {"init_std": 1 / WIDTH / std}}),
            **(routed if "router" in family.faults else {}),
        },
    }
    groups = leaven.parametrize(model, base=base, hyperparameters=hyperparameters, seed=seed, head_ratio=1.0)
    table: tuple[ParameterRow, ...] = getattr(model, "leaven_rows")  # noqa: B009
    if fault == "multiplier":
        _undo(model, lambda module: module is not _final_norm(model, table))
    if fault == "readout":
        for group in groups:
            if group["module"] == "unembedding":
                group["lr"] = 0.01
        if family.tied:
            _undo(model, lambda module: module is _final_norm(model, table))
    for group in groups:
        if group["module"] == FAULTS_OF_EXPERTS.get(fault):
            group["lr"] = 0.01
            if fault == "experts":
                for parameter in group["params"]:
                    parameter.data.mul_((width / WIDTH) ** 0.5)
    if family.tied:  # the readout starts as small as an untied one; the same at every size
        _final_norm(model, table).register_forward_hook(ScaleOutput(scale / WIDTH))
    return model, groups


def _final_norm(model: nn.Module, table: tuple[ParameterRow, ...]) -> nn.Module:
    name = next(row.name for row in table if row.role is Role.FINAL_NORM)
    return model.get_submodule(name.rpartition(".")[0])


def _undo(model: nn.Module, where: Callable[[nn.Module], bool]) -> None:
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, ScaleOutput) and where(module):
                del module._forward_hooks[key]


# Checks import a factory by name.
for _name, _family in FAMILIES.items():
    for _check in CHECKS:
        for _fault in ("", *_family.faults):
            globals()[f"{_name}_{_check}_{_fault}"] = partial(factory, _family, _check, _fault)


def checked(
    name: str, check: str, fault: str = "", *, widths: tuple[int, ...], depths: tuple[int, ...], seeds: int
) -> CheckDocument:
    """Return the result of a check of a family, in which a fault may be planted."""
    entry = f"{__name__ if __name__ != '__main__' else 'benchmarks.families'}:{name}_{check}_{fault}"
    family = foreign(entry, RunScale(min(widths), min(depths)), source=MADE_UP, batch_tokens=256)
    options: dict[str, Any] = {"steps": 10} if check == "gradients" else {}
    return CHECKS[check](family, widths, depths, seeds=seeds, **options).run()


@cache  # all faults along an axis have the same control
def failures(name: str, check: str, fault: str, axis: str, seeds: int) -> frozenset[tuple[str, str]]:
    """Return module and axis of the rows that fail if a family is checked along one axis."""
    widths, depths = SIZES[axis]
    document = checked(name, check, fault, widths=widths, depths=depths, seeds=seeds)
    return frozenset((row.module, row.axis) for row in document.rows if row.passed is False)


def found(name: str, fault: str) -> list[str]:
    """Return the checks that find a planted fault, along the axis that it depends on.

    A check finds it if a row fails that does not fail in the control, which is the same check without the fault. If
    there is no such row with one seed, both are run with more.
    """
    axis = "depth" if fault == "multiplier" else "width"
    return [
        check
        for check in CHECKS
        if any(failures(name, check, fault, axis, n) - failures(name, check, "", axis, n) for n in FAULT_SEEDS)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the table to docs/concepts/checks.md")
    parser.add_argument("--seeds", type=int, default=3, help="without a fault (default: 3)")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)} (default: all)")
    arguments = parser.parse_args()
    if unknown := set(arguments.families) - FAMILIES.keys():
        parser.error(f"no family {' or '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    torch.set_num_threads(1)
    lines = [
        "| family | blocks | coordinates | gradients | found: multiplier before the norm | found: readout "
        "| found: router | found: experts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    good = True
    print("\n".join(lines), flush=True)
    for name in arguments.families or FAMILIES:
        family, cells = FAMILIES[name], []
        for check in CHECKS:
            document = checked(name, check, widths=WIDTHS, depths=DEPTHS, seeds=arguments.seeds)
            judged = [row for row in document.rows if row.passed is not None]
            bad = [f"{row.module} ({row.axis})" for row in judged if row.passed is False]
            cells.append(f"passed, {len(judged)} rows" if not bad else "**failed**: " + ", ".join(bad))
            good = good and not bad
        for fault in (*FAULTS, *FAULTS_OF_EXPERTS):
            by = found(name, fault) if fault in family.faults else ["no experts"]
            cells.append(", ".join(by) or "**by none**")
            good = good and bool(by)
        lines.append(f"| {family.title} | {family.has} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if arguments.page:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
