#!/usr/bin/env python3
"""Times training steps of GPT-2 in plain PyTorch: eager or with torch.compile.

Prints one JSON object with the fields that `lockstep bench step --json` prints. `library_bytes` is what the
process had resident when torch was imported and nothing else done.
"""

import argparse
import json
import math
import resource
import time

import torch
import torch.nn.functional as F
from torch import nn

from configs import CONFIGS


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.dim, 3 * c.dim)
        self.out = nn.Linear(c.dim, c.dim)

    def forward(self, x):  # (batch, seq, dim)
        batch, seq, dim = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, dim))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(c.dim), Attention(c)
        self.norm2 = nn.LayerNorm(c.dim)
        self.up, self.down = nn.Linear(c.dim, 4 * c.dim), nn.Linear(4 * c.dim, c.dim)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(c.vocab, c.dim), nn.Embedding(c.seq, c.dim)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.dim)
        self.output = nn.Linear(c.dim, c.vocab, bias=False)
        self.output.weight = self.tokens.weight
        for name, param in self.named_parameters():
            if param.dim() == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * c.layers) if into_residual else 0.02)

    def forward(self, ids, targets):  # each (batch, seq)
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def main():
    args = parse()
    libraries = peak_bytes()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    c = CONFIGS[args.config]
    model = Gpt2(c)
    optimizer = adamw(model)
    forward = torch.compile(model) if args.how == "compile" else model
    line = torch.randint(c.vocab, (c.batch, c.seq + 1))
    ids, targets = line[:, :-1].contiguous(), line[:, 1:].contiguous()

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = forward(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    begun = time.perf_counter()
    first = step()  # compiles, and allocates the optimizer state
    prepared = time.perf_counter() - begun
    times, last = timed(step, args.seconds)
    step_s = sorted(times)[len(times) // 2]
    print(json.dumps({
        "program": f"torch-{args.how}", "config": args.config, "dtype": args.dtype, "ranks": 1,
        "threads": args.threads, "params": sum(param.numel() for param in model.parameters()),
        "tokens_per_s": c.tokens / step_s, "step_s": step_s, "steps": len(times), "first_step_s": prepared,
        "first_loss": first, "last_loss": last, "peak_bytes": peak_bytes(), "library_bytes": libraries, "torch": torch.__version__,
    }))


def adamw(model):
    """Weight decay on matrices only; fused AdamW."""
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)


WARM_STEPS, LEAST_STEPS = 2, 5


def timed(step, seconds):
    """The duration of each step in seconds, measured for about the given time, and the last loss."""
    for _ in range(WARM_STEPS):
        step()
    times, end = [], time.perf_counter() + seconds
    while len(times) < LEAST_STEPS or time.perf_counter() < end:
        begun = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - begun)
    return times, loss


def peak_bytes():
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", choices=CONFIGS, default="tiny")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--how", choices=["eager", "compile"], default="eager")
    parser.add_argument("--seconds", type=float, default=5.0, help="to measure, after warming up")
    return parser.parse_args()


if __name__ == "__main__":
    main()
