"""Gloo through torch.distributed: each rank times one op at each size.

One torch thread per rank, over loopback TCP, which is the transport that PyTorch builds Gloo with.
"""

import torch
import torch.distributed as dist

from measure import main

CALLS = {
    "all_reduce": "all_reduce, in place",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_gather": "all_gather_into_tensor",
    "all_to_all": "all_to_all_single",
    "broadcast": "broadcast",
}


class World:
    name = "gloo"

    def __init__(self):
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def barrier(self):
        dist.barrier()

    def maximum(self, value):
        return self.reduced(value, dist.ReduceOp.MAX)

    def total(self, value):
        return self.reduced(value, dist.ReduceOp.SUM)

    def reduced(self, value, reduction):
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, reduction)
        return tensor.item()

    def algo(self, op):
        return CALLS[op]

    def collective(self, op, send, recv):
        """A call without arguments. The tensors share the memory of the numpy buffers."""
        source, target = torch.from_numpy(send), torch.from_numpy(recv)
        return {
            "all_reduce": lambda: dist.all_reduce(target),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(target, source),
            "all_gather": lambda: dist.all_gather_into_tensor(target, source),
            "all_to_all": lambda: dist.all_to_all_single(target, source),
            "broadcast": lambda: dist.broadcast(target, 0),
        }[op]


if __name__ == "__main__":
    main(World)
    dist.destroy_process_group()
