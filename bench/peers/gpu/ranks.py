#!/usr/bin/env python3
"""Training steps of two ranks that share one GPU: Lockstep's layouts compared with PyTorch's DDP and FSDP2.

All programs take turns on the same model, global batch and precision; ranks are processes. The table has medians over
the rounds. PyTorch compiles each layer, but not the loss. Ranks of PyTorch share a GPU only with NCCL 2.30 or newer (`--nccl` names the
library) and NCCL_MULTI_RANK_GPU_ENABLE=1. Start the MPS daemon before: without it, processes take turns on the GPU and
a collective takes milliseconds. With `--torch` this file is one rank of the peer.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from configs import CONFIGS
from programs import print_record, run

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
ONE = "one rank"
LAYOUTS = {
    ONE: [],
    "data=2": ["data=2"],
    "data=2 zero=1": ["data=2", "zero=1"],
    "data=2 zero=2": ["data=2", "zero=2"],
    "data=2 zero=3": ["data=2", "zero=3"],
    "tensor=2": ["tensor=2", "sequence=true"],
    "pipe=2": ["pipe=2"],
}
PEERS = {"DDP": "ddp", "FSDP2": "fsdp"}


def main():
    args = parse()
    if args.torch:
        return torch_rank(args)
    programs = {name: lambda name=name: lockstep(args, name) for name in LAYOUTS}
    programs |= {name: lambda how=how: peer(args, how) for name, how in PEERS.items()}
    records = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, start in programs.items():
            records[name].append(start())
            print(f"{name}: {records[name][-1]}", file=sys.stderr, flush=True)
    c = CONFIGS[args.config]
    print(f"{args.config}: dim {c.dim}, {c.layers} layers, seq {c.seq}, global batch {c.batch}, {args.dtype}, two ranks")
    columns = ["tokens/s", "of one rank", "of DDP", "of FSDP2", "exposed", "GiB"]
    print(f"{'':<16}" + "".join(f"{column:>13}" for column in columns))
    rates = {name: median(found, "sustained_tokens_per_s") for name, found in records.items()}
    for name, found in records.items():
        if rates[name] is None:
            print(f"{name:<16}{'failed':>13}")
            continue
        ratios = [f"{rates[name] / rates[other]:.2f}" if rates[other] else "-" for other in (ONE, *PEERS)]
        exposed = percent(median(found, "comm_exposed"))
        memory = f"{median(found, 'peak_bytes') / 2**30:.2f}"
        print(f"{name:<16}{rates[name]:>13,.0f}" + "".join(f"{cell:>13}" for cell in [*ratios, exposed, memory]))


def median(records, key):
    values = [record.get(key) for record in records if record]
    return statistics.median(values) if len(values) == len(records) and None not in values else None


def percent(share):
    return "-" if share is None else f"{100 * share:.1f}%"


def lockstep(args, name):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.toml"
        file.write_text(run_file(CONFIGS[args.config], name))
        words = [args.lockstep, "bench", "step", "--config", file, "--dtype", args.dtype, "--json"]
        words += ["--seconds", args.seconds, *(f"--set=layout.{word}" for word in LAYOUTS[name])]
        return run(words)


def run_file(c, name):
    """The run file with the micro-batch of each layout: half the batch for data parallelism, an eighth for pipelines."""
    parts = {"data": 2, "pipe": 8}.get(name.split("=")[0], 1)
    whole = c.run_file()
    micro = max(1, c.batch // parts)
    return whole.replace(f"micro_batch = {c.batch}", f"micro_batch = {micro}")


def peer(args, how):
    """Starts both ranks of PyTorch: what rank 0 printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environment |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "16"}
    if args.nccl:
        environment["LD_PRELOAD"] = str(args.nccl)
    words = [args.python, __file__, "--torch", how, "--config", args.config, "--dtype", args.dtype]
    words += ["--seconds", args.seconds]
    other = subprocess.Popen(
        [str(word) for word in words], env=environment | {"RANK": "1"}, stdout=subprocess.DEVNULL
    )
    record = run(words, environment | {"RANK": "0"})
    if record is None:
        # It may wait for a rank that is gone.
        other.kill()
    other.wait()
    return record


def torch_rank(args):
    """One rank of DDP or FSDP2, on half of the batch."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from torch_step import Transformer, adamw

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    c = CONFIGS[args.config]
    with torch.device("cuda"):
        model = Transformer(c)
    for layer in model.layers:
        layer.compile()
    half = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    if args.torch == "ddp":
        forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        forward = model
    optimizer = adamw(model)
    line = torch.randint(min(c.vocab, 256), (c.batch // 2, c.seq + 1), device="cuda")
    ids, targets = line[:, :-1].contiguous(), line[:, 1:].contiguous()
    autocast = args.torch == "ddp" and args.dtype == "bf16"

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = forward(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    first = step()
    step()
    # Both ranks take the same number of steps: as many as rank 0 expects to take.
    torch.distributed.barrier()
    begun = time.perf_counter()
    for _ in range(3):
        step()
    steps = torch.tensor(max(4, int(args.seconds * 3 / (time.perf_counter() - begun))), device="cuda")
    torch.distributed.broadcast(steps, 0)
    times = []
    for _ in range(int(steps)):
        start = time.perf_counter()
        last = step()
        times.append(time.perf_counter() - start)
    if torch.distributed.get_rank() == 0:
        allocated = torch.cuda.max_memory_allocated()
        print_record(args.torch, args, c.tokens, times, peak_bytes=allocated, first_loss=first, last_loss=last)
    torch.distributed.destroy_process_group()


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", choices=list(CONFIGS), default="124m-b16")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="bf16")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nccl", type=Path, help="libnccl.so.2 for PyTorch; default: its own")
    parser.add_argument("--lockstep", type=Path, default=ROOT / "target/release/lockstep")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--torch", choices=list(PEERS.values()), help="be one rank of PyTorch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
