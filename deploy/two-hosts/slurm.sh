#!/usr/bin/env bash
# Two nodes of eight GPUs under Slurm: first the self-test of all nodes, then the training. The training survives
# preemption, time limits and lost nodes as in scripts/slurm/job.sh, which it calls.
#
#     sbatch deploy/two-hosts/slurm.sh
#
#SBATCH --job-name=lockstep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@90
set -u
lockstep=${LOCKSTEP:-lockstep}
runs=${RUNS:-$PWD/runs}
# sbatch runs a copy of this script, so paths are relative to the folder it was submitted from.
run=${RUN:-deploy/two-hosts/run.toml}

export LOCKSTEP_TOKEN_FILE=$PWD/.lockstep-token-$SLURM_JOB_ID
if [ ! -s "$LOCKSTEP_TOKEN_FILE" ]; then
    (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$LOCKSTEP_TOKEN_FILE")
fi

# Two minutes at most. A node that fails is named with what to do, and the job ends.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 bash -c "exec $lockstep launch --selftest --runs '$runs' --nnodes $SLURM_JOB_NUM_NODES \
    --node-rank \$SLURM_NODEID --nproc-per-node 8 --master-addr $first \
    --master-port $((32000 + SLURM_JOB_ID % 12000))" || exit 1

exec bash scripts/slurm/job.sh "$run" --runs "$runs" --nproc-per-node 8 --max-ranks 16 --min-ranks 8
