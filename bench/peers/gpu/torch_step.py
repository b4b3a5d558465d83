#!/usr/bin/env python3
"""Times training steps in PyTorch on a GPU: eager or with torch.compile.

Prints one JSON object with the fields that `lockstep bench step --json` prints.
"""

import argparse
import ctypes
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from configs import CONFIGS


class Attention(nn.Module):
    def __init__(self, c, bias):
        super().__init__()
        self.heads, self.key_heads, self.width = c.heads, c.key_heads, c.dim // c.heads
        self.qkv = nn.Linear(c.dim, (c.heads + 2 * c.key_heads) * self.width, bias=bias)
        self.out = nn.Linear(c.dim, c.dim, bias=bias)

    def forward(self, x, rope):  # (batch, seq, dim)
        batch, seq, dim = x.shape
        sizes = [self.heads * self.width, self.key_heads * self.width, self.key_heads * self.width]
        parts = self.qkv(x).split(sizes, dim=-1)
        q, k, v = (part.view(batch, seq, -1, self.width).transpose(1, 2) for part in parts)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        grouped = self.key_heads != self.heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).reshape(batch, seq, dim))


def rotate(x, rope):
    """Rotary embedding of (batch, heads, seq, width), by halves as Llama does."""
    cos, sin = rope
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Gelu(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up, self.down = nn.Linear(c.dim, c.hidden), nn.Linear(c.hidden, c.dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Swiglu(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.dim, 2 * c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.dim, bias=False)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """Tokens sorted by expert, and one grouped multiply for all experts, as torchtitan does."""

    def __init__(self, c):
        super().__init__()
        self.experts, self.top_k = c.experts, c.top_k
        self.router = nn.Linear(c.dim, c.experts, bias=False)
        self.up = nn.Parameter(torch.empty(c.experts, c.dim, 2 * c.hidden).normal_(std=0.02))
        self.down = nn.Parameter(torch.empty(c.experts, c.hidden, c.dim).normal_(std=0.02))

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        probs = self.router(x).float().softmax(dim=-1)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        order = chosen.view(-1).argsort(stable=True)
        counts = torch.bincount(chosen.view(-1), minlength=self.experts)
        offsets = counts.cumsum(0).to(torch.int32)
        rows = x[order // self.top_k].to(torch.bfloat16)
        gate, up = torch._grouped_mm(rows, self.up.to(torch.bfloat16), offs=offsets).chunk(2, dim=-1)
        out = torch._grouped_mm(F.silu(gate) * up, self.down.to(torch.bfloat16), offs=offsets)
        out = out * weights.view(-1)[order].unsqueeze(-1).to(out.dtype)
        sums = torch.zeros_like(x, dtype=out.dtype).index_add(0, order // self.top_k, out)
        return sums.view(shape)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        norm = nn.LayerNorm if c.family == "gpt2" else nn.RMSNorm
        self.norm1, self.norm2 = norm(c.dim), norm(c.dim)
        self.attention = Attention(c, bias=c.family == "gpt2")
        self.mlp = {"gpt2": Gelu, "llama": Swiglu, "moe": Experts}[c.family](c)

    def forward(self, x, rope):
        x = x + self.attention(self.norm1(x), rope)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab, c.dim)
        self.positions = nn.Embedding(c.seq, c.dim) if c.family == "gpt2" else None
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.dim) if c.family == "gpt2" else nn.RMSNorm(c.dim)
        self.output = nn.Linear(c.dim, c.vocab, bias=False)
        self.output.weight = self.tokens.weight
        if c.family != "gpt2":
            width = c.dim // c.heads
            angles = torch.outer(torch.arange(c.seq), 10000.0 ** (-torch.arange(0, width, 2) / width))
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * c.layers) if into_residual else 0.02)

    def forward(self, ids, targets):  # each (batch, seq)
        x, rope = self.tokens(ids), None
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        else:
            rope = (self.cos, self.sin)
        for layer in self.layers:
            x = layer(x, rope)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def main():
    args = parse()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    c = CONFIGS[args.config]
    with torch.device("cuda"):
        model = Transformer(c)
    optimizer = adamw(model)
    forward = torch.compile(model) if args.how == "compile" else model
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).cuda()
    places = torch.arange(c.seq + 1, device="cuda")

    def draw():
        """Inputs and targets of a step."""
        starts = torch.randint(len(text) - c.seq, (c.batch, 1), device="cuda")
        lines = text[starts + places].long()
        return lines[:, :-1].contiguous(), lines[:, 1:].contiguous()

    batch = draw()

    def step():
        nonlocal batch
        ids, targets = batch
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = forward(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # Before the caller reads the loss, so that the GPU never waits for a batch.
        batch = draw()
        return loss

    energy = Energy()
    begun = time.perf_counter()
    first = step().item()  # compiles, and allocates the optimizer state
    prepared = time.perf_counter() - begun
    for _ in range(2):
        step().item()
    times, readings = [], []
    # All time between steps counts: in a pause the GPU would cool down, and then be faster than it can stay. Reading the
    # counter takes milliseconds, so it is read twice a second.
    before = read = time.perf_counter()
    while sum(times) < args.seconds:
        last = step().item()
        now = time.perf_counter()
        times.append(now - before)
        before = now
        if not readings or now - read >= 0.5:
            readings.append((len(times), energy.joules()))
            read = now
    half = len(times) // 2
    (first_step, first_joules), (last_step, last_joules) = readings[len(readings) // 2], readings[-1]
    free, total = torch.cuda.mem_get_info()
    print(json.dumps({
        "program": f"torch-{args.how}", "config": args.config, "dtype": args.dtype,
        "params": sum(param.numel() for param in model.parameters()),
        "tokens_per_s": c.tokens / sorted(times)[half], "step_ms": 1e3 * sorted(times)[half], "steps": len(times),
        "sustained_tokens_per_s": c.tokens * (len(times) - half) / sum(times[half:]),
        "joules_per_1000_tokens": 1e3 * (last_joules - first_joules) / (c.tokens * max(1, last_step - first_step)),
        "peak_bytes": total - free, "allocated_bytes": torch.cuda.max_memory_allocated(),
        "first_step_s": prepared, "first_loss": first, "last_loss": last, "torch": torch.__version__,
    }))


class Energy:
    """The energy counter of the GPU."""

    def __init__(self):
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.nvml.nvmlInit_v2()
        self.device = ctypes.c_void_p()
        self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.device))

    def joules(self):
        millijoules = ctypes.c_ulonglong()
        self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.device, ctypes.byref(millijoules))
        return millijoules.value / 1e3


def adamw(model):
    """Weight decay on matrices only; fused AdamW."""
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", choices=list(CONFIGS), required=True)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="bf16")
    parser.add_argument("--text", type=Path, required=True, help="trains on the bytes of this file")
    parser.add_argument("--how", choices=["eager", "compile"], default="compile")
    parser.add_argument("--seconds", type=float, default=20.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
