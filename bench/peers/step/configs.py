"""The models of the step benchmark; the same as those of `lockstep bench step --config NAME`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    vocab: int
    dim: int
    layers: int
    heads: int
    seq: int
    batch: int

    @property
    def tokens(self):
        """Tokens per step."""
        return self.batch * self.seq


CONFIGS = {
    "tiny": Config(vocab=256, dim=128, layers=4, heads=4, seq=128, batch=16),
    "small": Config(vocab=8192, dim=512, layers=8, heads=8, seq=256, batch=4),
    "gpt2": Config(vocab=50257, dim=768, layers=12, heads=12, seq=512, batch=1),
}
