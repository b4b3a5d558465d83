"""The models of the GPU benchmark, for both programs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    family: str  # gpt2, llama or moe
    dim: int
    layers: int
    heads: int
    seq: int
    batch: int
    vocab: int = 50304
    kv_heads: int = 0  # 0: as heads
    ffn: int = 0  # 0: 4 * dim
    experts: int = 0
    top_k: int = 0

    @property
    def tokens(self):
        """Tokens per step."""
        return self.batch * self.seq

    @property
    def key_heads(self):
        return self.kv_heads or self.heads

    @property
    def hidden(self):
        return self.ffn or 4 * self.dim

    def run_file(self, tokens=None):
        """The run file for Lockstep, to train on a token file or on generated text."""
        lines = [
            'name = "bench"',
            "[model]",
            f'family = "{self.family}"',
            f"dim = {self.dim}",
            f"layers = {self.layers}",
            f"heads = {self.heads}",
            f"vocab = {self.vocab}",
            f"seq = {self.seq}",
            f"ffn = {self.hidden}",
            "tied = true",
        ]
        if self.family != "gpt2":
            lines.append(f"kv_heads = {self.key_heads}")
        if self.experts:
            lines += [f"experts = {self.experts}", f"top_k = {self.top_k}", "aux_loss = 0.0", "z_loss = 0.0"]
        lines += [
            "[data]",
            f'source = "{tokens or "builtin:grammar"}"',
            f"seq = {self.seq}",
            "[train]",
            "steps = 1000000",
            f"global_batch = {self.batch}",
            f"micro_batch = {self.batch}",
            "clip = 1.0",
        ]
        return "\n".join(lines) + "\n"


def gpt2(dim, layers, heads, batch, **more):
    return Config("gpt2", dim, layers, heads, 1024, batch, **more)


LLAMA_1B = dict(dim=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocab=128256)

CONFIGS = {
    "124m-b16": gpt2(768, 12, 12, 16),
    "124m-b32": gpt2(768, 12, 12, 32),
    "124m-b64": gpt2(768, 12, 12, 64),
    "350m-b16": gpt2(1024, 24, 16, 16),
    "1.5b-b8": gpt2(1600, 48, 25, 8),
    "llama1b-4k": Config("llama", seq=4096, batch=4, **LLAMA_1B),
    "llama1b-8k": Config("llama", seq=8192, batch=2, **LLAMA_1B),
    "moe-8x": Config("moe", 768, 12, 12, 1024, 16, ffn=2048, experts=8, top_k=2),
    "tiny": Config("gpt2", 128, 4, 4, 128, 16, vocab=264),
}
