"""Find the role and the module name of each parameter of a user's model.

The role says how a scaling rule treats the parameter. The module name, such as ``mlp.out``, selects the multipliers
that tuning sets.

Role and module name follow from the parameter's own name, the type of the torch module that owns it, and the
dimensions that grow between two sizes of the model. If a role or module name is ambiguous, an error asks the user for
``roles`` or ``modules``.
"""

import warnings
from collections import defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NoReturn

from torch import nn

from leaven.errors import InputError
from leaven.interop.architectures import module_names
from leaven.interop.structure import EXPERTS, NO_BLOCKS, ModelStructure, ParameterSite, is_a, label_of
from leaven.interop.tracing import output_norms
from leaven.recipe.shape import BRANCH_ENDS, Parameter, Role

_NAMES = module_names()
# The names of matrices in attention and MLP, by leaven's name of the module.
_BRANCHES = {
    branch: {module: names for module, names in _NAMES.items() if module.startswith(f"{branch}.")}
    for branch in ("attention", "mlp")
}
# Words in the path of a module that show its branch.
_NAMES_OF_BRANCHES = {"attention": ("attention", "attn"), "mlp": ("mlp", "ffn", "feed_forward", "moe")}
_SHARED_EXPERTS = ("shared_experts", "shared_expert", "shared")
_ROUTERS = ("gate", "router")
# Names of query and key norms, which normalise each head, or all heads together.
_OVER_HEADS = _NAMES["norm.query"] | _NAMES["norm.key"]
# Latent attention computes queries from one short vector (a latent), and keys and values from another. Names of the
# norms of these latents, and of the matrices that read a latent.
_OF_LATENTS = _NAMES["norm.query_latent"] | _NAMES["norm.key_value_latent"]
_FROM_LATENTS = ("q_b_proj", "kv_b_proj")
# Names that only norms on a branch's output have. A norm with one of these names is refused if running the base
# (tracing.py) does not show that it normalises a branch's output.
_POST_NORM = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_self_attn_layernorm")

_BIASES = (Role.EMBEDDING_BIAS, Role.HIDDEN_BIAS, Role.FINAL_BIAS, Role.UNEMBEDDING_BIAS)
_NO_RULE = "there is no rule for biases of experts and for convolutions; use a model without them"
# By role: the module name that all parameters of this role have. Parameters of other roles have several.
_MODULES = {
    **dict.fromkeys(_BIASES, "biases"),
    Role.EMBEDDING_NORM: "norm.embedding",
    Role.ROUTER: "mlp.router",
    Role.UNEMBEDDING: "unembedding",
    Role.FINAL_NORM: "norm.final",
}

_NORMS_IN_BLOCKS = (
    "norm.query",
    "norm.key",
    "norm.query_latent",
    "norm.key_value_latent",
    "norm.attention",
    "norm.mlp",
)


class Classifier:
    """Finds the role and the module of each parameter of a model, with the help of a smaller base model.

    ``model`` and ``base`` are the structures of the model and the base model, and ``root`` is the base model itself.
    ``roles`` and ``modules`` are the user's corrections: a role or a module, by parameter name or glob pattern.
    """

    def __init__(
        self,
        model: ModelStructure,
        base: ModelStructure,
        root: nn.Module,
        roles: Mapping[str, str],
        modules: Mapping[str, str],
    ) -> None:
        self.model, self.base, self.root = model, base, root
        # For each norm on the output of a branch: its label and the name of the branch. Set by `classify`.
        self.output_norms: dict[str, str] = {}
        self._untraced = ""  # why the base could not be run; empty if it was
        names = [site.name for site in model.sites]
        for option, given in (("roles", roles), ("modules", modules)):
            for pattern in given:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise InputError(f"{option}: no parameter matches {pattern!r}; the first parameter is {names[0]}")
        for pattern, role in roles.items():
            if role not in list(Role):
                raise InputError(f"roles[{pattern!r}]: unknown role {role!r}; the roles are {', '.join(Role)}")
        self.roles, self.modules = roles, modules
        # Number of routed experts (in the model, in the base), by the path of the module that contains the experts.
        in_base = {site.beside_experts: site.n_experts for site in base.sites if site.experts}
        self.experts = {
            site.beside_experts: (site.n_experts, in_base[site.beside_experts])
            for site in model.sites
            if site.experts
        }
        for beside, (of_model, of_base) in self.experts.items():
            if of_model != of_base:
                raise InputError(
                    f"{'.'.join(beside)}: the model has {of_model} experts and the base has {of_base}; no rule "
                    "covers this, so give a base with the same number"
                )

    def classify(self) -> dict[str, Parameter]:
        """Return the parameters with their roles and modules, by name."""
        classified: dict[str, Parameter] = {}
        traced = False
        # Tensors with the most dimensions come first, so that an error names the experts and not their router.
        for site in sorted(self.model.sites, key=lambda site: -site.parameter.ndim):
            if site.parameter.ndim < 2 and not traced:
                self._trace(classified)
                traced = True
            role = _given(self.roles, site)
            role = self._role(site) if role is None else Role(role)
            if role.is_matrix and site.parameter.ndim != (3 if role is Role.EXPERT_WEIGHT else 2):
                self._refuse(site, f"a {role} must be a matrix, but this has {site.parameter.ndim} dimensions")
            classified[site.name] = Parameter(site.name, site.shape, role, self._module(site, role), site.layer)
        if not traced:  # a model of matrices only may have norms without gains
            self._trace(classified)
        self._check_branches(classified)
        return classified

    # Roles: found from type and position, then checked against the shape.

    def _role(self, site: ParameterSite) -> Role:
        if is_norm(site):
            return self._norm_role(site)
        if is_linear(site.owner) and site.is_bias:
            if site.layer is not None:
                return Role.HIDDEN_BIAS
            return Role.UNEMBEDDING_BIAS if self._is_readout(site) else self._refuse(site, "it is outside the blocks")
        if isinstance(site.owner, nn.Embedding) and site.layer is None:
            self._require_width(site)
            return Role.TIED_EMBEDDING if any(map(is_linear, site.owners)) else Role.EMBEDDING
        of_experts = site.experts and site.parameter.ndim == 3
        if of_experts or self._is_router(site) or (is_linear(site.owner) and site.parameter.ndim == 2):
            return self._matrix_role(site)
        self._refuse(site, f"a parameter of {type(site.owner).__name__} is not an embedding, matrix, gain or bias")

    def _matrix_role(self, site: ParameterSite) -> Role:
        if site.layer is None:
            if not self._is_readout(site):
                why = "it is outside the blocks, but not a readout (a matrix after them with fan out = vocabulary)"
                self._refuse(site, why if self.model.stacks else f"{why}, as {NO_BLOCKS}")
            self._require_width(site)
            return Role.UNEMBEDDING
        if self._is_router(site):
            return Role.ROUTER
        widths = (self.model.width, self.base.width)
        sides = zip(site.shape[-2:], site.base_shape[-2:], strict=True)
        if widths not in sides and site.path[-1] not in _FROM_LATENTS:
            self._refuse(site, f"neither fan in nor fan out is the width ({widths[0]}, or {widths[1]} in the base)")
        return Role.HIDDEN_WEIGHT if site.parameter.ndim == 2 else Role.EXPERT_WEIGHT

    def _is_router(self, site: ParameterSite) -> bool:
        """Return whether a parameter is a router: a matrix ``gate`` or ``router`` beside the experts."""
        return any(
            site.path[: len(beside)] == beside
            and site.path[len(beside) : len(beside) + 1] in {(name,) for name in _ROUTERS}
            and (site.shape, site.base_shape) == tuple(zip(numbers, (self.model.width, self.base.width), strict=True))
            for beside, numbers in self.experts.items()
        )

    def _norm_role(self, site: ParameterSite) -> Role:
        if site.layer is None:
            # The name counts first, because norms outside the blocks may be registered in any order.
            at_embedding = site.path[-1] in _NAMES["norm.embedding"]
            if not at_embedding and not site.after_blocks:
                self._refuse(site, "it is a norm before the blocks")
            self._require_width(site)
            if at_embedding:
                return Role.EMBEDDING_BIAS if site.is_bias else Role.EMBEDDING_NORM
            return Role.FINAL_BIAS if site.is_bias else Role.FINAL_NORM
        if site.is_bias:
            return Role.HIDDEN_BIAS
        if ".".join(site.path) in self.output_norms:
            self._require_width(site)
            return Role.OUTPUT_NORM
        if site.path[-1] not in _OVER_HEADS:
            if site.path[-1] not in _OF_LATENTS:
                self._require_width(site)
            return Role.HIDDEN_NORM
        # Heads share a gain of the size of one head. If the head dimension is unknown, a gain that does not grow is
        # taken as shared.
        shared = site.shape[-1] in self.model.head_dims if self.model.head_dims else self._ratio(site) == 1
        return Role.QK_NORM if shared and site.parameter.ndim == 1 else Role.HIDDEN_NORM

    def _is_readout(self, site: ParameterSite) -> bool:
        """Return whether a parameter is the weight or bias of an unembedding."""
        return (
            site.after_blocks
            and site.shape[0] in self.model.vocabularies
            and site.base_shape[0] in self.base.vocabularies
        )

    def _require_width(self, site: ParameterSite) -> None:
        if self._ratio(site) != self.model.width / self.base.width:
            self._refuse(
                site, f"its last dimension does not grow like the width, {self.base.width} -> {self.model.width}"
            )

    def _ratio(self, site: ParameterSite) -> float:
        return site.shape[-1] / site.base_shape[-1]

    # Modules: the names under which parameters are tuned.

    def _module(self, site: ParameterSite, role: Role) -> str:
        given = _given(self.modules, site)
        if given is not None and role not in _BIASES:
            if given in BRANCH_ENDS and not role.in_branches:
                raise InputError(
                    f"modules: {site.name} has the role {role}, so its module cannot be {given}, the last matrix of "
                    "a residual branch; give another module"
                )
            return given
        if role in _MODULES:
            return _MODULES[role]
        if role is Role.OUTPUT_NORM:
            return f"norm.{self.output_norms['.'.join(site.path)]}_out"
        if role in {Role.EMBEDDING, Role.TIED_EMBEDDING}:
            return "positions" if any("pos" in part.lower() or part == "wpe" for part in site.path) else "embedding"
        leaf = site.path[-1]
        if role.in_branches:
            # The matrices of experts may be tensors of the module `experts` itself.
            leaf = leaf if leaf != EXPERTS else site.label.rpartition(".")[2]
            within = "mlp.experts." if site.experts else "mlp.shared." if self._is_shared(site) else "mlp."
            inside = " ".join(site.path[:-1]).lower()
            named = [branch for branch, words in _NAMES_OF_BRANCHES.items() if any(word in inside for word in words)]
            possible = {module: names for branch in named or _BRANCHES for module, names in _BRANCHES[branch].items()}
            found = [module for module, names in possible.items() if leaf in names]
            if len(found) != 1:
                self._refuse(site, "its name does not show which matrix of the attention or MLP it is", *possible)
            return found[0].replace("mlp.", within)
        if leaf in _POST_NORM:
            self._refuse(
                site,
                "by its name it is a norm on a branch's output, but a run of the base does not confirm this"
                + self._untraced,
                "norm.mlp_out",
                "norm.attention_out",
                "norm.mlp",
            )
        for module in _NORMS_IN_BLOCKS:
            if leaf in _NAMES[module]:
                return module
        self._refuse(
            site,
            "its name does not show whether this norm is before attention or before the MLP",
            "norm.attention",
            "norm.mlp",
        )

    def _is_shared(self, site: ParameterSite) -> bool:
        return any(
            site.path[: len(beside)] == beside and set(site.path[len(beside) :]) & set(_SHARED_EXPERTS)
            for beside in self.experts
        )

    def _trace(self, classified: Mapping[str, Parameter]) -> None:
        """Run the base to find the norms on the outputs of residual branches, and set the attribute ``output_norms``.

        The user's option ``modules`` takes precedence. Warn if the base cannot be run and ``modules`` does not name
        every norm in the blocks. ``classified`` has the model's matrices by parameter name.
        """
        ends = {site.label: classified[site.name].module for site in self.model.sites if site.name in classified}
        paths: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for site in self.base.sites:
            if ends.get(site.label) in BRANCH_ENDS:
                end = site.name.rpartition(".")[0]
                if site.experts and site.parameter.ndim == 3:
                    end = site.name.partition(f".{EXPERTS}.")[0] + f".{EXPERTS}"
                paths[ends[site.label].partition(".")[0]][site.layer or 0].append(end)
        try:
            found = output_norms(self.root, {branch: list(blocks.values()) for branch, blocks in paths.items()})
            self.output_norms = {label_of(self.root, path): branch for path, branch in found.items()}
        except InputError:
            raise
        except Exception as error:  # raised by the user's own model code
            self._untraced = f" (running the base failed: {type(error).__name__}: {error!s:.80})"
            inside = [site for site in self.model.sites if site.layer is not None and not site.is_bias]
            gains = [site for site in inside if is_norm(site) and site.path[-1] not in _OVER_HEADS | _OF_LATENTS]
            unnamed = [gain.name for gain in gains if _given(self.modules, gain) is None]
            if unnamed or not gains:
                example = (unnamed or ["*.mlp_norm.weight"])[0]
                warnings.warn(
                    f"the base cannot be run on token ids alone ({type(error).__name__}: {error!s:.80}), so leaven "
                    "cannot find the norms on the outputs of residual branches; name each norm in the blocks, e.g. "
                    f"modules={{{example!r}: NAME}}; NAME is 'norm.attention' or 'norm.mlp' for a norm before the "
                    "branch, and 'norm.attention_out' or 'norm.mlp_out' for a norm on its output",
                    stacklevel=4,
                )
        for site in self.model.sites:
            given = _given(self.modules, site) or ""
            label = ".".join(site.path)
            if given in {"norm.attention_out", "norm.mlp_out"}:
                self.output_norms[label] = given.removeprefix("norm.").removesuffix("_out")
            elif given.startswith("norm."):
                self.output_norms.pop(label, None)

    # Each branch needs exactly one last matrix, because its multiplier acts there. Experts are an exception: each has
    # its own last matrix, or one tensor has the last matrices of all.

    def _check_branches(self, classified: Mapping[str, Parameter]) -> None:
        branches: dict[tuple[str, int, str, tuple[str, ...]], dict[str, list[ParameterSite]]] = {}
        for site in self.model.sites:
            found = classified[site.name]
            if found.role.in_branches and site.layer is not None:
                expert = site.path[:-1] if found.role is Role.HIDDEN_WEIGHT and site.experts else ()
                place = (site.stack, site.layer, found.module.rpartition(".")[0], expert)
                branches.setdefault(place, {}).setdefault(found.module, []).append(site)
        for (_, _, name, _), matrices in branches.items():
            self._check_branch(name, matrices)
        ended = {place[:2] for place in branches}
        for site in self.model.sites:
            if site.layer is not None and (site.stack, site.layer) not in ended:
                raise InputError(
                    f"{site.name}: its block has no attention or MLP matrix; leaven.parametrize supports only blocks "
                    "with attention or an MLP"
                )

    def _check_branch(self, name: str, matrices: Mapping[str, list[ParameterSite]]) -> None:
        out = f"{name}.out"
        first, ends = next(iter(matrices.values()))[0], matrices.get(out, [])
        if out not in BRANCH_ENDS:
            why = f"the last matrix of its residual branch must be one of {', '.join(BRANCH_ENDS)}, not {out}"
            self._refuse(first, why, "mlp.in", "mlp.out")
        if len(ends) != 1:
            names = ", ".join(end.name for end in ends) or "none"
            self._refuse(first, f"its branch must end in exactly one matrix, but ends in {names}", out)
        end = ends[0]
        if end.shape[-2] != self.model.width:
            self._refuse(end, f"it ends a branch, but its fan out is not the width {self.model.width}", f"{name}.in")
        if not name.startswith("mlp"):
            return
        for side, times in (("gate", 1), ("in", 1), ("gate_in", 2)):
            for site in matrices.get(f"{name}.{side}", []):
                if site.shape[-2] != times * end.shape[-1]:
                    raise InputError(
                        f"{site.name} ({_text(site.shape)}): its fan out is not {'twice ' * (times - 1)}the fan in "
                        f"of {end.name}; if it is a router, pass roles={{{site.name!r}: 'router'}}"
                    )

    def _refuse(self, site: ParameterSite, why: str, *modules: str) -> NoReturn:
        """Raise InputError with ``why``, and an example that sets one of ``modules``, or without them a role."""
        option, may_be = ("modules", modules) if modules else ("roles", _may_be(site))
        others = "".join(f" or {other!r}" for other in may_be[1:])
        hint = f"classify it, e.g. {option}={{{site.name!r}: {may_be[0]!r}}}{others}" if may_be else _NO_RULE
        shapes = f"{_text(site.shape)}, {_text(site.base_shape)} in the base"
        raise InputError(f"{site.name} ({shapes}): {why}; {hint}")


def _given(given: Mapping[str, str], site: ParameterSite) -> str | None:
    return next((value for pattern, value in given.items() if fnmatchcase(site.name, pattern)), None)


def _may_be(site: ParameterSite) -> tuple[str, ...]:
    """Return the roles that fit a parameter's number of dimensions and its place before, in or after the blocks."""
    kind = "bias" if site.is_bias else "norm"
    match site.parameter.ndim, site.layer is not None, site.after_blocks:
        case 2, True, _:
            return () if site.experts else (Role.HIDDEN_WEIGHT.value,)
        case 2, _, after:
            return (Role.UNEMBEDDING.value if after else Role.EMBEDDING.value,)
        case 1, True, _:
            return tuple(dict.fromkeys((f"hidden_{kind}", "hidden_norm", "hidden_bias")))
        case 1, _, after:
            return (f"final_{kind}",) if after else (f"embedding_{kind}", f"final_{kind}")
        case _:
            return ()


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_a(module, "Conv1D")


def is_norm(site: ParameterSite) -> bool:
    """Return whether a parameter is a norm's gain or bias, based on its module's type and path."""
    if is_linear(site.owner):
        return False
    in_path = any("norm" in part.lower() or part.lower().startswith("ln") for part in site.path[-2:])
    if site.parameter.ndim == 2:
        return in_path and site.path[-1] in _OVER_HEADS
    return site.parameter.ndim == 1 and (in_path or "norm" in type(site.owner).__name__.lower())


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"
