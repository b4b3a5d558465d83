#!/usr/bin/env python3
"""Training steps with the optimizer in host memory: Lockstep's layout.offload compared with FSDP2 and CPUOffloadPolicy.

Both programs run on one GPU and all cores, each in a process of its own, with the same model, batch and precision, and
take turns. The table has medians over the rounds and the ratio to FSDP2. `--memory-gib` limits the memory of both. With
`--fsdp` this file is the peer itself: it times FSDP2 and prints one JSON object with the fields that
`lockstep bench step --json` prints.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from configs import CONFIGS
from programs import print_record, run

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def main():
    args = parse()
    if args.fsdp:
        return fsdp(args)
    c = CONFIGS[args.config]
    print(f"{args.config}: dim {c.dim}, {c.layers} layers, seq {c.seq}, batch {c.batch}, {args.dtype}")
    peer = "FSDP2 CPUOffloadPolicy"
    programs = {f"lockstep {offload}": lambda offload=offload: lockstep(args, offload) for offload in args.offloads}
    programs[peer] = lambda: run([args.python, __file__, "--fsdp", *common(args)])
    records = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, start in programs.items():
            records[name].append(start())
    medians = {name: summary(found) for name, found in records.items()}
    print(f"{'':<32}{'tokens/s':>12}{'ratio':>8}{'step ms':>10}{'GiB':>8}")
    for name, found in medians.items():
        show(name, found, medians[peer])


def lockstep(args, offload):
    """Runs `bench step` with an offload mode: the object that it printed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.toml"
        file.write_text(CONFIGS[args.config].run_file())
        words = [args.lockstep, "bench", "step", "--config", file, "--dtype", args.dtype, "--json"]
        words += ["--seconds", args.seconds, "--threads", os.cpu_count(), f"--set=layout.offload={offload}"]
        words += [f"--set=device.memory_gib={args.memory_gib}"] if args.memory_gib else []
        return run(words)


def common(args):
    words = ["--config", args.config, "--dtype", args.dtype, "--seconds", args.seconds]
    return words + (["--memory-gib", args.memory_gib] if args.memory_gib else [])


def summary(records):
    """Medians of tokens/s, milliseconds and bytes; nothing if a run failed."""
    if None in records:
        return None
    memory = [record.get("allocated_bytes") or record["peak_bytes"] for record in records]
    columns = [[record[key] for record in records] for key in ("sustained_tokens_per_s", "step_ms")]
    return [statistics.median(column) for column in [*columns, memory]]


def show(name, found, peer):
    if found is None:
        return print(f"{name:<32}{'failed':>12}")
    rate, milliseconds, memory = found
    ratio = f"{rate / peer[0]:.2f}" if peer else "-"
    print(f"{name:<32}{rate:>12,.0f}{ratio:>8}{milliseconds:>10.1f}{memory / 2**30:>8.2f}")


def fsdp(args):
    """Times FSDP2 on one GPU with parameters, gradients and optimizer in page-locked host memory."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch_step import Transformer, adamw

    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29517")
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    torch.cuda.set_device(0)
    if args.memory_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.memory_gib * 2**30 / total)
    torch.manual_seed(0)
    c = CONFIGS[args.config]
    model = Transformer(c)
    half = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    policies = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    for layer in model.layers:
        fully_shard(layer, **policies)
    fully_shard(model, **policies)
    optimizer = adamw(model)
    line = torch.randint(min(c.vocab, 256), (c.batch, c.seq + 1), device="cuda")
    ids, targets = line[:, :-1].contiguous(), line[:, 1:].contiguous()

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = model(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    first = step()
    step()
    times = []
    while sum(times) < args.seconds:
        start = time.perf_counter()
        last = step()
        times.append(time.perf_counter() - start)
    reserved = torch.cuda.max_memory_reserved()
    print_record("fsdp2-offload", args, c.tokens, times, peak_bytes=reserved, first_loss=first, last_loss=last)
    torch.distributed.destroy_process_group()


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", choices=list(CONFIGS), default="1.5b-b8")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="bf16")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-gib", type=float, help="limit of the GPU memory for tensors")
    parser.add_argument("--offloads", nargs="+", default=["optimizer", "optimizer+gradients"])
    parser.add_argument("--lockstep", type=Path, default=ROOT / "target/release/lockstep")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--fsdp", action="store_true", help="time FSDP2 in this process")
    return parser.parse_args()


if __name__ == "__main__":
    main()
