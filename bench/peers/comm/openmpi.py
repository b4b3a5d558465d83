"""Open MPI through mpi4py: each rank of an mpirun times one op at each size.

The transport is Open MPI's own choice, shared memory between ranks of one machine.
"""

from mpi4py import MPI

from measure import main

CALLS = {
    "all_reduce": "Allreduce, MPI_IN_PLACE",
    "reduce_scatter": "Reduce_scatter_block",
    "all_gather": "Allgather",
    "all_to_all": "Alltoall",
    "broadcast": "Bcast",
}


class World:
    name = "openmpi"

    def __init__(self):
        self.comm = MPI.COMM_WORLD
        self.rank, self.ranks = self.comm.rank, self.comm.size

    def barrier(self):
        self.comm.Barrier()

    def maximum(self, value):
        return self.comm.allreduce(value, MPI.MAX)

    def total(self, value):
        return self.comm.allreduce(value, MPI.SUM)

    def algo(self, op):
        return CALLS[op]

    def collective(self, op, send, recv):
        """A call without arguments. Buffers are described once, outside the timed loop."""
        comm, part = self.comm, len(send) // self.ranks
        kind = MPI._typedict[send.dtype.char]
        source, target = [send, len(send), kind], [recv, len(recv), kind]
        return {
            "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, target, MPI.SUM),
            "reduce_scatter": lambda: comm.Reduce_scatter_block([send, part, kind], target, MPI.SUM),
            "all_gather": lambda: comm.Allgather(source, [recv, len(send), kind]),
            "all_to_all": lambda: comm.Alltoall([send, part, kind], [recv, part, kind]),
            "broadcast": lambda: comm.Bcast(target, 0),
        }[op]


if __name__ == "__main__":
    main(World)
