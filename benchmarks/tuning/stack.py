"""Train many recipes of one shape at once on one device: a stack of trials.

Every tensor has a leading dimension K, one entry a recipe, and every product is a batched one, so that models too
small to fill a GPU fill it together. On CUDA the forward and backward pass is compiled and a step is one CUDA graph.
The recipes share shape, batch and number of tokens. They may differ in hyperparameters, warm-up and seed.

This is a second trainer, for benchmarks only. tests/benchmarks/test_stack.py holds its losses against those of
leaven's engine. Shapes: K recipes, B sequences, T tokens, D d_model, H heads, E entries of a head, V vocabulary.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from leaven.data.tokens import TokenSet
from leaven.model.initialisation import fill
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table
from leaven.training.device import DTYPES

VALUES = ("lr", "weight_decay", "beta1", "beta2", "eps")
WARM = 3  # steps before the capture of a graph


class Stack:
    """The buffers and the compiled step for K recipes like ``like``, for any number of calls of :meth:`train`."""

    def __init__(self, like: Recipe, size: int, tokens: TokenSet, device: str) -> None:
        shape = like.model
        plain = (shape.norm, shape.activation, shape.positions, shape.bias, shape.embedding_norm, shape.dropout)
        assert plain == ("rmsnorm", "swiglu", "rope", False, False, 0.0), "the stack has one architecture"
        assert shape.qk_norm
        assert not shape.qk_norm_per_head
        assert not shape.tied_embeddings
        assert shape.n_heads == shape.n_kv_heads
        assert shape.vocab_size < 2**15
        self.shape, self.size, self.tokens, self.device = shape, size, tokens, torch.device(device)
        self.dtype = DTYPES[like.precision.compute]
        self.sequences = like.batch.tokens // shape.seq_len
        self.names = [parameter.name for parameter in shape.parameters()]
        sizes = {parameter.name: parameter.shape for parameter in shape.parameters()}

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        # All parameters lie in one buffer (K, P), so that an update is one kernel.
        counts = [math.prod(sizes[name]) for name in self.names]
        self.flat, self.first, self.second = (zeros(size, sum(counts)) for _ in range(3))
        parts = self.flat.split(counts, 1)
        self.parameters = {name: part.unflatten(1, sizes[name]) for name, part in zip(self.names, parts, strict=True)}
        self.owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(self.device)
        self.values = {value: zeros(size, len(counts)) for value in VALUES}
        branches = [f"layers.{i}.{end}.out.weight" for i in range(shape.n_layers) for end in ("attention", "mlp")]
        self.multipliers = {name: zeros(size, 1, 1, 1) for name in (*branches, "unembedding.weight")}
        self.clip, self.step, self.schedule = zeros(size), zeros(1, dtype=torch.int64), zeros(0, size)
        self.windows = zeros(size, 0, dtype=torch.int16)
        self.attention_scale = parameter_table(like).attention_scale
        places = torch.arange(shape.seq_len, dtype=torch.float64)
        angles = torch.outer(places, shape.rope_theta ** -(torch.arange(0, shape.d_head, 2).double() / shape.d_head))
        self.cos, self.sin = (part.float().to(self.device)[:, None] for part in (angles.cos(), angles.sin()))
        self.losses: Callable[..., Tensor] = self._losses
        self.update: Callable[..., None] = self._update
        if self.device.type == "cuda":
            self.losses, self.update = torch.compile(self._losses), torch.compile(self._update)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.trained = 0.0  # tokens of all recipes
        self.seconds = 0.0  # without filling the buffers

    def train(self, recipes: Sequence[Recipe]) -> list[float]:
        """Return the validation loss of each recipe, nats per token; not finite if it diverged."""
        assert 0 < len(recipes) <= self.size
        filled = [*recipes, *(recipes[-1:] * (self.size - len(recipes)))]
        steps = recipes[0].steps
        self._fill(filled, steps)
        self.seconds += self.all_steps()
        self.trained += len(recipes) * recipes[0].data.tokens
        return self._evaluate(recipes[0])[: len(recipes)]

    def all_steps(self) -> float:
        """Train with what the buffers contain, and return the seconds."""
        self.step.zero_()
        began = time.perf_counter()
        for _ in range(len(self.schedule)):
            if self.graph is None:
                self._one_step()
            else:
                self.graph.replay()
        int(self.step)  # waits for the device
        return time.perf_counter() - began

    def _fill(self, recipes: Sequence[Recipe], steps: int) -> None:
        shape, first = self.shape, recipes[0]
        assert all((r.model, r.batch, r.data.tokens) == (shape, first.batch, first.data.tokens) for r in recipes)
        tables = [parameter_table(recipe) for recipe in recipes]
        assert {table.attention_scale for table in tables} == {self.attention_scale}
        capture = self.device.type == "cuda" and (self.graph is None or len(self.schedule) != steps)
        if len(self.schedule) != steps:  # the graph reads these by their address
            self.graph = None
            self.schedule = torch.zeros(steps, self.size, device=self.device)
            windows = (self.size, steps, self.sequences, shape.seq_len + 1)
            self.windows = torch.zeros(windows, dtype=torch.int16, device=self.device)
        samples: dict[int, Tensor] = {}
        for k, (recipe, table) in enumerate(zip(recipes, tables, strict=True)):
            seed, clip = recipe.data.seed, recipe.hyperparameters.grad_clip
            assert clip.mode == "global"
            self.clip[k] = clip.limit or math.inf
            if seed not in samples:
                drawn = self.tokens.stream(shape.seq_len, seed).batch(0, steps * self.sequences)
                samples[seed] = torch.from_numpy(drawn.astype(np.int16)).to(self.device).view(self.windows.shape[1:])
            self.windows[k] = samples[seed]
            ends = (np.arange(steps) + 1) * recipe.batch.tokens
            multiplier = [recipe.schedule.multiplier(float(end), recipe.data.tokens) for end in ends]
            self.schedule[:, k] = torch.tensor(multiplier, device=self.device)
            for row in table.rows:
                start = torch.empty(row.shape)
                fill(start, row.name, row.init_mean, row.init_std, seed)
                self.parameters[row.name][k] = start.to(self.device)
                if row.name in self.multipliers:
                    self.multipliers[row.name][k] = row.multiplier
            rows = {row.name: row for row in table.rows}
            for value, buffer in self.values.items():
                buffer[k] = torch.tensor([getattr(rows[name], value) for name in self.names], device=self.device)
        if capture:
            self._capture()
            return self._fill(recipes, steps)  # the steps before the capture changed the state
        self.first.zero_()
        self.second.zero_()
        return None

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                self._one_step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._one_step()

    def _one_step(self) -> None:
        windows = self.windows.index_select(1, self.step)[:, 0].long()
        leaves = {name: value.detach().requires_grad_() for name, value in self.parameters.items()}
        gradients = torch.autograd.grad(self.losses(leaves, windows).sum(), list(leaves.values()))
        self.update(torch.cat([gradient.flatten(1) for gradient in gradients], 1), self.schedule[self.step][0])
        self.step += 1

    @torch.no_grad()
    def _update(self, gradient: Tensor, factor: Tensor) -> None:
        """AdamW as torch has it, after clipping each recipe's gradient (K, P) by its norm. ``factor`` (K,) is that of
        the schedule."""
        norm = gradient.square().sum(1).sqrt()
        g = gradient * (self.clip / (norm + 1e-6)).clamp(max=1.0)[:, None]
        count = (self.step + 1).double()
        beta1, beta2 = self.values["beta1"], self.values["beta2"]
        correction1, correction2 = (1 - (beta.double() ** count) for beta in (beta1, beta2))
        rate = self.values["lr"] * factor[:, None]

        def each(value: Tensor) -> Tensor:
            return value.float()[:, self.owner]

        self.first.mul_(each(beta1)).add_(g * each(1 - beta1))
        self.second.mul_(each(beta2)).add_(g * g * each(1 - beta2))
        root = self.second.sqrt() * each(correction2.rsqrt()) + each(self.values["eps"])
        kept = self.flat * each(1 - rate * self.values["weight_decay"])
        self.flat.copy_(kept - each(rate / correction1) * self.first / root)

    def _losses(self, p: Mapping[str, Tensor], windows: Tensor) -> Tensor:
        """Return the mean loss of each recipe (K,) over windows (K, B, T + 1)."""
        shape, inputs, targets = self.shape, windows[..., :-1], windows[..., 1:]
        k, b, t = inputs.shape
        heads = (k * b, t, shape.n_heads, shape.d_head)

        def norm(x: Tensor, name: str) -> Tensor:
            gain = p[f"{name}.weight"]
            return (F.rms_norm(x, x.shape[-1:], eps=shape.norm_eps) * gain[:, None]).to(self.dtype)

        def product(x: Tensor, name: str) -> Tensor:
            return torch.bmm(x, p[f"{name}.weight"].to(self.dtype).mT)

        def per_head(x: Tensor, name: str) -> Tensor:
            x = x.view(k, b * t * shape.n_heads, shape.d_head)
            x = norm(x.float(), name).view(heads)
            low, high = x.chunk(2, -1)
            cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
            return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).transpose(1, 2)

        number = torch.arange(k, device=windows.device)[:, None, None]
        x = p["embedding.weight"][number, inputs].view(k, b * t, shape.d_model)
        for layer in range(shape.n_layers):
            at = f"layers.{layer}"
            h = norm(x, f"{at}.norm.attention")
            query, key = (
                per_head(product(h, f"{at}.attention.{side}"), f"{at}.norm.{side}") for side in ("query", "key")
            )
            value = product(h, f"{at}.attention.value").view(heads).transpose(1, 2)
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.attention_scale)
            y = product(y.transpose(1, 2).reshape(k, b * t, -1), f"{at}.attention.out")
            x = x + y * self.multipliers[f"{at}.attention.out.weight"][:, 0]
            h = norm(x, f"{at}.norm.mlp")
            h = F.silu(product(h, f"{at}.mlp.gate")) * product(h, f"{at}.mlp.in")
            x = x + product(h, f"{at}.mlp.out") * self.multipliers[f"{at}.mlp.out.weight"][:, 0]
        hidden = norm(x, "norm.final").float() * self.multipliers["unembedding.weight"][:, 0]
        logits = product(hidden.to(self.dtype), "unembedding").float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(k, b * t).mean(1)

    def _evaluate(self, recipe: Recipe) -> list[float]:
        """Evaluate in batches of the training's size and with gradients, for which the pass is compiled already."""
        found = self.tokens.validation_windows(self.shape.seq_len, recipe.evaluation.tokens)
        windows = torch.from_numpy(found).to(self.device)
        leaves = {name: value.detach().requires_grad_() for name, value in self.parameters.items()}
        total = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        for part in windows.split(self.sequences):
            missing = part[:1].expand(self.sequences - len(part), -1)
            losses = self.losses(leaves, torch.cat((part, missing)).expand(self.size, -1, -1).contiguous()).detach()
            if len(missing):  # of the whole mean
                alone = self.losses(leaves, part[:1].expand(self.size, self.sequences, -1).contiguous()).detach()
                total += losses.double() * self.sequences - alone.double() * len(missing)
            else:
                total += losses.double() * self.sequences
        return [float(loss) for loss in total / len(windows)]
