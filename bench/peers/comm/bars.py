"""Targets relative to the peers. A target is reported, never asserted."""

from dataclasses import dataclass

K, M = 1 << 10, 1 << 20
ANY = 1 << 62


@dataclass
class Bar:
    op: str
    ranks: int
    ours: str
    factor: float  # required speed relative to the peer
    peer: str
    least: int = 0  # smallest size in bytes
    most: int = ANY  # largest size in bytes


BARS = [
    Bar("all_reduce", 2, "lockstep-sym", 2.5, "openmpi", least=1 * M),
    Bar("all_reduce", 2, "lockstep-sym", 0.70, "bound", least=1 * M),
    Bar("all_reduce", 2, "lockstep-shm", 1.3, "openmpi", least=1 * M),
    Bar("all_reduce", 2, "lockstep-shm", 6.0, "gloo", least=1 * M),
    Bar("all_reduce", 2, "lockstep-shm", 1.0, "openmpi", least=4 * K, most=4 * K),
    Bar("all_reduce", 2, "lockstep-tcp", 1.5, "gloo", least=16 * M),
    Bar("all_reduce", 4, "lockstep-shm", 1.0, "openmpi"),
    Bar("reduce_scatter", 2, "lockstep-shm", 3.0, "openmpi", least=16 * M),
    Bar("all_gather", 2, "lockstep-shm", 1.0, "openmpi", least=64 * K),
    Bar("all_to_all", 2, "lockstep-shm", 1.0, "openmpi", least=64 * K),
    Bar("broadcast", 2, "lockstep-shm", 1.0, "openmpi", least=64 * K),
    Bar("reduce_scatter", 2, "lockstep-shm", 4.0, "gloo", least=1 * M),
    Bar("all_gather", 2, "lockstep-shm", 4.0, "gloo", least=1 * M),
    Bar("all_to_all", 2, "lockstep-shm", 4.0, "gloo", least=1 * M),
    Bar("broadcast", 2, "lockstep-shm", 4.0, "gloo", least=1 * M),
]
