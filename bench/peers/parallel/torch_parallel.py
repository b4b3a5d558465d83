#!/usr/bin/env python3
"""One rank of a training step shared by several: PyTorch's DDP or FSDP2 over Gloo.

The model, the optimizer and the clock are those of ../step/torch_step.py. run.py starts one process per rank, with
RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set; rank 0 prints one JSON object.
"""

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))
from configs import CONFIGS
from torch_step import Gpt2, adamw


def main():
    args = parse()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    c = CONFIGS[args.config]
    torch.manual_seed(0)  # the same parameters everywhere
    model = Gpt2(c)
    params = sum(param.numel() for param in model.parameters())
    model, bf16 = (ddp if args.how == "ddp" else fsdp2)(model, args.dtype == "bf16")
    optimizer = adamw(model)
    torch.manual_seed(1 + rank)  # another part of the global batch
    line = torch.randint(c.vocab, (c.batch, c.seq + 1))
    ids, targets = line[:, :-1].contiguous(), line[:, 1:].contiguous()

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    first = step()
    times, last = timed(step, args.seconds)
    step_s = sorted(times)[len(times) // 2]
    peak = torch.tensor([peak_bytes()])
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({
            "config": args.config, "dtype": args.dtype, "ranks": ranks, "threads": args.threads, "params": params,
            "tokens_per_s": ranks * c.tokens / step_s, "step_s": step_s, "steps": len(times), "first_loss": first,
            "last_loss": last, "peak_bytes": peak.item(), "torch": torch.__version__,
        }))
    dist.barrier()
    dist.destroy_process_group()


def ddp(model, bf16):
    """DDP with gradients as bucket views; bf16 by autocast."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True), bf16


def fsdp2(model, bf16):
    """Parameters, gradients and moments cut among the ranks, layer by layer; bf16 is what is gathered and
    computed with, gradients are summed in f32."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy), False


WARM_STEPS, LEAST_STEPS = 2, 3


def timed(step, seconds):
    """Seconds of each step, until some rank has measured for so long, and the last loss."""
    for _ in range(WARM_STEPS):
        step()
    times = []
    while True:
        begun = perf_counter()
        loss = step()
        times.append(perf_counter() - begun)
        done = torch.tensor([int(len(times) >= LEAST_STEPS and sum(times) >= seconds)])
        dist.all_reduce(done, dist.ReduceOp.MAX)
        if done.item():
            return times, loss


def peak_bytes():
    """The most memory this process ever had resident."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", choices=CONFIGS, default="tiny")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--how", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--seconds", type=float, default=5.0, help="to measure, after warming up")
    return parser.parse_args()


if __name__ == "__main__":
    main()
