#!/usr/bin/env bash
# A training on several nodes that survives preemption, time limits and lost nodes:
#
#     sbatch --nodes=2 scripts/slurm/job.sh runs.toml [more of `lockstep train`]
#
# One launcher per node starts that node's ranks; they meet at the first node. The run file and the folder of runs
# must be on a file system that all nodes see.
#
# - Ranks or launchers that die are started again within the job, from the newest checkpoint.
# - SIGTERM (preemption, or 90 s before the time limit, by --signal below) has all ranks save and stop; the job puts
#   itself back into the queue and goes on from there. So does `scontrol requeue`.
# - A lost node: Slurm puts the job back into the queue (--requeue).
#
#SBATCH --job-name=lockstep
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@90
set -u
lockstep=${LOCKSTEP:-lockstep}

# The secret that the nodes of this job share; nobody else can read it.
export LOCKSTEP_TOKEN_FILE=${LOCKSTEP_TOKEN_FILE:-$PWD/.lockstep-token-$SLURM_JOB_ID}
if [ ! -s "$LOCKSTEP_TOKEN_FILE" ]; then
    (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$LOCKSTEP_TOKEN_FILE")
fi

# Without --kill-on-bad-exit a node that leaves does not take the others along.
srun --kill-on-bad-exit=0 "$lockstep" train "$@" --resume=if-any --nnodes "$SLURM_JOB_NUM_NODES" \
    ${MASTER_ADDR:+--master-addr "$MASTER_ADDR"} --master-port "${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 12000))}"
code=$?

case $code in
0) rm -f "$LOCKSTEP_TOKEN_FILE" ;;
75) # Stopped as asked, and saved.
    echo "stopped and saved; back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
    ;;
esac
exit $code
