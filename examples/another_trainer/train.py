"""Train a small character-level GPT on the source of a Python module. This file knows nothing of leaven."""

import argparse
import inspect

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--learning_rate", type=float, default=1e-3)
parser.add_argument("--weight_decay", type=float, default=0.1)
parser.add_argument("--beta2", type=float, default=0.99)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--max_iters", type=int, default=80)
parser.add_argument("--eval_interval", type=int, default=5)
parser.add_argument("--seed", type=int, default=1337)
parser.add_argument("--out_dir", default="out")
config = parser.parse_args()

torch.manual_seed(config.seed)
torch.set_num_threads(1)
text = inspect.getsource(argparse)
characters = sorted(set(text))
data = torch.tensor([characters.index(letter) for letter in text])
train_data, val_data = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]
block_size, n_embd, n_head, n_layer = 32, 32, 2, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        heads = self.c_attn(self.ln_1(x)).unflatten(-1, (3, n_head, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(characters), n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*(Block() for _ in range(n_layer)))
        self.head = nn.Sequential(nn.LayerNorm(n_embd), nn.Linear(n_embd, len(characters)))

    def forward(self, x, y):
        logits = self.head(self.blocks(self.wte(x) + self.wpe.weight))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def get_batch(source, size, generator=None):
    at = torch.randint(len(source) - block_size - 1, (size,), generator=generator)
    x = torch.stack([source[i : i + block_size + 1] for i in at])
    return x[:, :-1], x[:, 1:]


model = GPT()
betas = (0.9, config.beta2)
optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, betas, weight_decay=config.weight_decay)
for step in range(config.max_iters + 1):
    if step % config.eval_interval == 0:
        with torch.no_grad():
            loss = model(*get_batch(val_data, 128, torch.Generator().manual_seed(0)))
        print(f"step {step}: val loss {loss:.4f}")
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * max(1 - step / config.max_iters, 0.05)
    loss = model(*get_batch(train_data, config.batch_size))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
