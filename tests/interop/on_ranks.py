"""Run by ``test_machinery`` on two ranks: FSDP2 and tensor parallelism give the same training as one process."""

import math
from typing import Any

import torch
import torch.distributed as dist
from tests.interop.families import gpt2, llama, sharded, stepped, values
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import leaven

OPTIONS: dict[str, Any] = {"hyperparameters": {"lr": 0.01, "init_std": 0.1, "weight_decay": 0.1}, "initialise": True}


def trained(model: nn.Module, base: nn.Module) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    groups = leaven.parametrize(model, base=base, **OPTIONS)
    return values(groups), stepped(model, groups)


def from_meta(mesh: DeviceMesh) -> Any:
    """Build a sharded model from the meta device, as for a model that does not fit on one device."""
    with torch.device("meta"):
        model: Any = llama(64, 4)
    sharded(model, mesh).to_empty(device="cpu")
    model.model.rotary_emb = llama(64, 4).model.rotary_emb
    return model


def split(model: Any, mesh: DeviceMesh) -> Any:
    """Split a model by tensor parallelism."""
    attention = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {
        "self_attn.o_proj": RowwiseParallel()
    }
    mlp = {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")} | {"mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, attention | mlp)
    return model


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole = {build: trained(build(64, 4), build(32, 2)) for build in (llama, gpt2)}
    cases = {
        "FSDP2, llama": (llama, sharded(llama(64, 4), mesh)),
        "FSDP2, gpt2": (gpt2, sharded(gpt2(64, 4), mesh)),
        "FSDP2, from meta": (llama, from_meta(mesh)),
        "tensor parallel": (llama, split(llama(64, 4), mesh)),
    }
    for name, (build, model) in cases.items():
        settings, parameters = trained(model, build(32, 2))
        assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters()) < sum(
            math.prod(p.shape) for p in model.parameters()
        )
        wanted, expected = whole[build]
        assert settings == wanted, name
        for parameter, value in parameters.items():
            torch.testing.assert_close(value, expected[parameter], rtol=1e-4, atol=1e-5, msg=f"{name}: {parameter}")
        if dist.get_rank() == 0:
            print(f"{name}: as the whole")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
