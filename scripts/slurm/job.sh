#!/usr/bin/env bash
# A training on several nodes that survives preemption, time limits and lost nodes:
#
#     sbatch --nodes=2 scripts/slurm/job.sh run.toml [options of `lockstep train`]
#
# One launcher per node starts that node's ranks; they connect to the first node. The run file and the folder of runs
# must be on a shared file system.
#
# - Ranks or launchers that die are restarted within the job, from the newest checkpoint.
# - On SIGTERM (preemption, or 90 s before the time limit, see --signal below) all ranks save and stop. The job requeues
#   itself and resumes from there. `scontrol requeue` has the same effect.
# - When a node is lost, Slurm requeues the job (--requeue).
#
#SBATCH --job-name=lockstep
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@90
set -u
lockstep=${LOCKSTEP:-lockstep}

# The token shared by the nodes of this job; readable only by this user.
export LOCKSTEP_TOKEN_FILE=${LOCKSTEP_TOKEN_FILE:-$PWD/.lockstep-token-$SLURM_JOB_ID}
if [ ! -s "$LOCKSTEP_TOKEN_FILE" ]; then
    (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$LOCKSTEP_TOKEN_FILE")
fi

# With --kill-on-bad-exit=0, a node that leaves does not terminate the others.
srun --kill-on-bad-exit=0 "$lockstep" train "$@" --resume=if-any --nnodes "$SLURM_JOB_NUM_NODES" \
    ${MASTER_ADDR:+--master-addr "$MASTER_ADDR"} --master-port "${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 12000))}"
code=$?

case $code in
0) rm -f "$LOCKSTEP_TOKEN_FILE" ;;
75) # Stopped on request after saving.
    echo "stopped and saved; requeueing"
    scontrol requeue "$SLURM_JOB_ID"
    ;;
esac
exit $code
