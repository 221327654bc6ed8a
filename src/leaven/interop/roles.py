"""What each parameter of a foreign model is to a rule.

The witnesses are the shapes in a smaller model of the same family (which dimensions grow), the type of the module
and its place. Where they leave a doubt, or the name does not say which branch a matrix belongs to, the parameter is
refused by name, and ``roles`` or ``modules`` say what it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NoReturn

from torch import nn

from leaven.interop.anatomy import Anatomy, Site, is_a
from leaven.recipe.errors import InputError
from leaven.recipe.shape import BRANCH_ENDS, Role

_ATTENTION = {
    "query": ("q_proj", "query", "wq"),
    "key": ("k_proj", "key", "wk"),
    "value": ("v_proj", "value", "wv"),
    "query_key_value": ("query_key_value", "qkv_proj", "qkv", "wqkv", "c_attn"),
    "out": ("o_proj", "out_proj", "c_proj", "dense", "out", "wo"),
}
_MLP = {
    "gate": ("gate_proj", "gate"),
    "in": ("up_proj", "c_fc", "fc1", "fc_in", "dense_h_to_4h", "in", "up"),
    "gate_in": ("gate_up_proj",),
    "out": ("down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "out", "down"),
}
_NORM = {
    "query": ("q_norm", "query_norm", "q_layernorm", "query_layernorm", "query"),
    "key": ("k_norm", "key_norm", "k_layernorm", "key_layernorm", "key"),
    "attention": ("input_layernorm", "ln_1", "ln1", "norm1", "attention_norm", "attn_norm", "attention"),
    "mlp": (
        *("post_attention_layernorm", "pre_feedforward_layernorm"),
        *("ln_2", "ln2", "norm2", "ffn_norm", "mlp_norm", "mlp"),
    ),
}
_OVER_HEADS = {*_NORM["query"], *_NORM["key"]}
_EMBEDDING_NORM = ("embedding", "embedding_norm", "embed_norm", "emb_norm", "ln_emb", "word_embeddings_layernorm")
# On a branch's output, where a norm would undo the branch's multiplier.
_POST_NORM = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_self_attn_layernorm")

_BIASES = (Role.EMBEDDING_BIAS, Role.HIDDEN_BIAS, Role.FINAL_BIAS, Role.UNEMBEDDING_BIAS)
_NO_RULE = "there is no rule for mixtures of experts and convolutions"
# The modules of the roles that have one only.
_MODULES = {
    **dict.fromkeys(_BIASES, "biases"),
    Role.EMBEDDING_NORM: "norm.embedding",
    Role.UNEMBEDDING: "unembedding",
    Role.FINAL_NORM: "norm.final",
}


@dataclass(frozen=True)
class Claim:
    """What a parameter is to the rule, and the name it is tuned by."""

    role: Role
    module: str


class Classifier:
    """Role and module of each parameter of ``model``, from itself, its like in ``base``, and what the user says.

    Raises:
        InputError: naming the parameter that cannot be classified, and what to say about it.
    """

    def __init__(
        self,
        model: Anatomy,
        base: Anatomy,
        likes: Mapping[str, Site],
        roles: Mapping[str, str],
        modules: Mapping[str, str],
    ) -> None:
        self.model, self.base, self.likes = model, base, likes
        names = [site.name for site in model.sites]
        for option, said in (("roles", roles), ("modules", modules)):
            for pattern in said:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise InputError(f"{option}: no parameter is named {pattern!r}; the first is {names[0]}")
        for pattern, role in roles.items():
            if role not in list(Role):
                raise InputError(f"roles[{pattern!r}]: no role {role!r}; there are {', '.join(Role)}")
        self.roles, self.modules = roles, modules

    def claims(self) -> dict[str, Claim]:
        """By name, every parameter exactly once."""
        claims = {}
        # What no rule can have comes first: the router beside experts in one tensor is not the trouble.
        for site in sorted(self.model.sites, key=lambda site: -site.parameter.ndim):
            role = self._said(self.roles, site)
            role = self._role(site) if role is None else Role(role)
            if role.is_matrix and site.parameter.ndim != 2:
                self._refuse(site, f"a {role} is a matrix, and this has {site.parameter.ndim} dimensions")
            claims[site.name] = Claim(role, self._module(site, role))
        self._check_branches(claims)
        return claims

    # Roles: type and place first, then the shapes have to agree.

    def _role(self, site: Site) -> Role:
        if is_norm(site):
            return self._norm_role(site)
        if is_linear(site.owner) and site.is_bias:
            if site.layer is not None:
                return Role.HIDDEN_BIAS
            return Role.UNEMBEDDING_BIAS if self._is_readout(site) else self._refuse(site, "it is outside the blocks")
        if isinstance(site.owner, nn.Embedding) and site.layer is None:
            self._needs(site, "last dimension", self._moves_as_width(site, -1))
            return Role.TIED_EMBEDDING if any(map(is_linear, site.owners)) else Role.EMBEDDING
        if is_linear(site.owner) and site.parameter.ndim == 2:
            return self._matrix_role(site)
        self._refuse(site, f"a parameter of {type(site.owner).__name__} is no embedding, matrix, gain or bias")

    def _matrix_role(self, site: Site) -> Role:
        if site.layer is None:
            if not self._is_readout(site):
                self._refuse(site, "a matrix outside the blocks that does not end in the vocabulary")
            self._needs(site, "fan in", self._moves_as_width(site, -1))
            return Role.UNEMBEDDING
        like = self.likes[site.name]
        widths = (self.model.width, self.base.width)
        if widths not in zip(site.shape, like.shape, strict=True):
            self._refuse(site, f"neither fan in nor fan out is the width, {widths[0]} and {widths[1]}")
        return Role.HIDDEN_WEIGHT

    def _norm_role(self, site: Site) -> Role:
        if site.layer is None:
            # By name first: the order of registration says little of a norm that is no block's.
            at_embedding = site.path[-1] in _EMBEDDING_NORM
            if not at_embedding and not site.after_blocks:
                self._refuse(site, "a norm outside the blocks and ahead of them")
            self._needs(site, "size", self._moves_as_width(site, -1))
            if at_embedding:
                return Role.EMBEDDING_BIAS if site.is_bias else Role.EMBEDDING_NORM
            return Role.FINAL_BIAS if site.is_bias else Role.FINAL_NORM
        if site.is_bias:
            return Role.HIDDEN_BIAS
        if site.path[-1] not in _OVER_HEADS:
            self._needs(site, "size", self._moves_as_width(site, -1))
            return Role.HIDDEN_NORM
        # One gain for all heads, or one for each: by the head dimension, else by what grows.
        shared = site.shape[-1] in self.model.head_dims if self.model.head_dims else self._ratio(site, -1) == 1
        return Role.QK_NORM if shared and site.parameter.ndim == 1 else Role.HIDDEN_NORM

    def _is_readout(self, site: Site) -> bool:
        """A linear after the blocks whose outputs are as many as a table of embeddings has rows, in both models."""
        return (
            site.after_blocks
            and site.shape[0] in self.model.vocabularies
            and self.likes[site.name].shape[0] in self.base.vocabularies
        )

    def _moves_as_width(self, site: Site, dimension: int) -> bool:
        return self._ratio(site, dimension) == self.model.width / self.base.width

    def _ratio(self, site: Site, dimension: int) -> float:
        return site.shape[dimension] / self.likes[site.name].shape[dimension]

    def _needs(self, site: Site, what: str, holds: bool) -> None:
        if not holds:
            self._refuse(site, f"its {what} does not grow as the width, {self.base.width} -> {self.model.width}")

    # Modules: the name a person tunes by.

    def _module(self, site: Site, role: Role) -> str:
        said = self._said(self.modules, site)
        if said is not None and role not in _BIASES:
            if said in BRANCH_ENDS and role is not Role.HIDDEN_WEIGHT:
                raise InputError(f"modules: {site.name} is a {role} and cannot be {said}, which ends a branch")
            return said
        if role in _MODULES:
            return _MODULES[role]
        match role:
            case Role.EMBEDDING | Role.TIED_EMBEDDING:
                return "positions" if is_position(site) else "embedding"
            case Role.HIDDEN_NORM | Role.QK_NORM:
                return self._norm_module(site)
            case _:
                return self._matrix_module(site)

    def _norm_module(self, site: Site) -> str:
        leaf = site.path[-1]
        if leaf in _POST_NORM:
            raise InputError(
                f"{site.name} is a norm on a branch's output, where it undoes the branch's multiplier; the rules "
                "are for pre-norm blocks"
            )
        for module, names in _NORM.items():
            if leaf in names:
                return f"norm.{module}"
        self._refuse(site, "its name does not say which branch the norm precedes", "norm.attention", "norm.mlp")

    def _matrix_module(self, site: Site) -> str:
        inside = " ".join(site.path[:-1]).lower()
        branches = {
            "attention": _ATTENTION if "attention" in inside or "attn" in inside else {},
            "mlp": _MLP if any(word in inside for word in ("mlp", "ffn", "feed_forward")) else {},
        }
        if not any(branches.values()):
            branches = {"attention": _ATTENTION, "mlp": _MLP}
        found = [
            f"{branch}.{module}"
            for branch, modules in branches.items()
            for module, names in modules.items()
            if site.path[-1] in names
        ]
        if len(found) != 1:
            may_be = [f"{branch}.{module}" for branch, modules in branches.items() for module in modules]
            self._refuse(site, "its name does not say what it is in its branch", *may_be)
        return found[0]

    # Branches: a multiplier left out is a fault that nothing else would show.

    def _check_branches(self, claims: Mapping[str, Claim]) -> None:
        """Each block has a branch, and each branch with matrices one end, which writes to the residual stream."""
        branches: dict[tuple[str, int, str], dict[str, list[Site]]] = {}
        for site in self.model.sites:
            claim = claims[site.name]
            if claim.role is Role.HIDDEN_WEIGHT and site.layer is not None:
                branch = branches.setdefault((site.stack, site.layer, claim.module.partition(".")[0]), {})
                branch.setdefault(claim.module, []).append(site)
        for (_, _, name), matrices in branches.items():
            self._check_branch(f"{name}.out", matrices)
        ended = {(stack, layer) for stack, layer, _ in branches}
        for site in self.model.sites:
            if site.layer is not None and (site.stack, site.layer) not in ended:
                raise InputError(
                    f"{site.name}: its block has no matrix that ends a branch, where its multiplier could act; "
                    "leaven.parametrize is for blocks of attention and MLP"
                )

    def _check_branch(self, out: str, matrices: Mapping[str, list[Site]]) -> None:
        first, ends = next(iter(matrices.values()))[0], matrices.get(out, [])
        if out not in BRANCH_ENDS:
            self._refuse(first, f"only {' and '.join(BRANCH_ENDS)} end a branch, not {out}", "mlp.in", "mlp.out")
        if len(ends) != 1:
            names = ", ".join(end.name for end in ends) or "none"
            self._refuse(first, f"its branch needs one matrix that ends it and has {names}", out)
        end = ends[0]
        if end.shape[0] != self.model.width:
            self._refuse(end, f"it ends a branch, but its fan out is not the width {self.model.width}", "mlp.in")
        for module, times in (("mlp.gate", 1), ("mlp.in", 1), ("mlp.gate_in", 2)):
            for site in matrices.get(module, []):
                if site.shape[0] != times * end.shape[1]:
                    raise InputError(
                        f"{site.name} ({_text(site.shape)}): its fan out is not the fan in of {end.name}: a router? "
                        f"{_NO_RULE}"
                    )

    @staticmethod
    def _said(said: Mapping[str, str], site: Site) -> str | None:
        return next((value for pattern, value in said.items() if fnmatchcase(site.name, pattern)), None)

    def _refuse(self, site: Site, why: str, *modules: str) -> NoReturn:
        """With what may be said of it: one of ``modules``, else a role that its place and dimensions allow."""
        option, may_be = ("modules", modules) if modules else ("roles", _may_be(site))
        said = "".join(f" or {other!r}" for other in may_be[1:])
        hint = f"say what it is, as in {option}={{{site.name!r}: {may_be[0]!r}}}{said}" if may_be else _NO_RULE
        shapes = f"{_text(site.shape)}, {_text(self.likes[site.name].shape)} in the base"
        raise InputError(f"{site.name} ({shapes}): {why}; {hint}")


def _may_be(site: Site) -> tuple[str, ...]:
    kind = "bias" if site.is_bias else "norm"
    match site.parameter.ndim, site.layer is not None, site.after_blocks:
        case 2, True, _:
            return (Role.HIDDEN_WEIGHT.value,)
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


def is_norm(site: Site) -> bool:
    """A gain or bias of a module whose type or path says norm; or gains per head, of the queries or keys."""
    if is_linear(site.owner):
        return False
    in_path = any("norm" in part.lower() or part.lower().startswith("ln") for part in site.path[-2:])
    if site.parameter.ndim == 2:
        return in_path and site.path[-1] in _OVER_HEADS
    return site.parameter.ndim == 1 and (in_path or "norm" in type(site.owner).__name__.lower())


def is_position(site: Site) -> bool:
    return any("pos" in part.lower() or part == "wpe" for part in site.path)


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"
