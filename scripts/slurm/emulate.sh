#!/usr/bin/env bash
# Emulates two Slurm nodes on one machine. scripts/slurm/job.sh runs on both, one of them is lost, Slurm requeues the
# job, the node returns, and the job finishes with the weights of an undisturbed run. Then the same with a preemption:
# the job is signalled, saves, requeues itself, and finishes.
#
# Needs root and Debian's slurm-wlm and munge, which it tries to install. All files are in a temporary directory that is
# removed at the end.
#
#     scripts/slurm/emulate.sh [--binary target/release/lockstep]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
binary=$root/target/release/lockstep
[ "${1:-}" = --binary ] && binary=$(realpath "$2")
[ "$(id -u)" = 0 ] || { echo "running two slurmd on one machine needs root" >&2; exit 1; }
command -v slurmd slurmctld sbatch munged >/dev/null || apt-get install -y --no-install-recommends slurm-wlm munge

dir=$(mktemp -d /tmp/lockstep-slurm-XXXXXX)
daemons=()
say() { printf '== %s\n' "$1"; }

cleanup() {
    scancel --full --signal=KILL --state=RUNNING 2>/dev/null || true
    for pid in "${daemons[@]}"; do kill -9 "$pid" 2>/dev/null || true; done
    for file in "$dir"/slurmd-*.pid; do [ -s "$file" ] && kill -9 "$(cat "$file")" 2>/dev/null || true; done
    rm -rf "$dir"
}
trap cleanup EXIT

# Munge with its own key and socket.
mkdir -m 755 "$dir/munge"
head -c 1024 /dev/urandom >"$dir/munge/key"
chmod 400 "$dir/munge/key"
munged --foreground --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munge/pid" \
    --log-file="$dir/munge/log" --seed-file="$dir/munge/seed" >"$dir/munge.out" 2>&1 &
daemons+=($!)
disown

cores=$(nproc)
ports=$((20000 + $$ % 10000))
mkdir "$dir/state" "$dir/spool-node0" "$dir/spool-node1"
cat >"$dir/slurm.conf" <<CONF
ClusterName=emulated
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$ports
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
SchedulerType=sched/builtin
ReturnToService=2
SlurmdTimeout=8
InactiveLimit=0
KillWait=20
MinJobAge=300
JobRequeue=1
NodeName=node0 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((ports + 1)) CPUs=$cores
NodeName=node1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((ports + 2)) CPUs=$cores
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$dir/slurm.conf
until [ -S "$dir/munge/socket" ]; do sleep 0.1; done

slurmctld -D -c >"$dir/slurmctld.out" 2>&1 &
daemons+=($!)
disown
start_node() { slurmd -N "$1" -D >>"$dir/$1.out" 2>&1 & daemons+=($!); eval "$1=$!"; disown; }
start_node node0
start_node node1

# wait_for SECONDS WHAT COMMAND…
wait_for() {
    local until=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do
        if [ $SECONDS -ge $until ]; then
            echo "timed out: $what" >&2
            tail -n 40 "$dir"/*.out "$dir"/*.log "$dir"/job-*.txt >&2 || true
            exit 1
        fi
        sleep 0.2
    done
}
idle() { [ "$(sinfo -h -o %D -t idle)" = 2 ]; }
state() { scontrol show job "$1" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p'; }
is() { [ "$(state "$1")" = "$2" ]; }
restarts() { scontrol show job "$1" | sed -n 's/.* Restarts=\([0-9]*\).*/\1/p'; }
requeued() { [ "$(restarts "$1")" -ge "$2" ]; }
step() { cat "$dir/runs/$1/metrics.jsonl" 2>/dev/null | grep -c '"loss"' || true; }
past() { [ "$(step "$1")" -ge "$2" ]; }
# Slurm delays requeued jobs; here there are no other jobs to consider.
start_now() { scontrol update JobId="$1" StartTime=now 2>/dev/null || true; is "$1" RUNNING; }
weights() {
    "$binary" export "$dir/runs/$1" --to "$dir/$1.exported" >/dev/null
    cat "$dir/$1.exported"/*.safetensors | sha256sum | cut -d' ' -f1
}

wait_for 30 "two idle nodes" idle
say "two nodes: $(sinfo -h -o '%N %T')"

run=$root/scripts/chaos/run.toml
words=(--set layout.data=2 --set train.steps=200)
(cd "$dir" && "$binary" train "$run" "${words[@]}" --set name=whole >"$dir/whole.txt")
expected=$(weights whole)

submit() {
    # Both nodes are this machine, so their names do not resolve.
    (cd "$dir" && LOCKSTEP=$binary MASTER_ADDR=127.0.0.1 sbatch --parsable --nodes=2 --output="$dir/job-%j.txt" \
        "$root/scripts/slurm/job.sh" "$run" "${words[@]}" --set name="$1")
}
finish() {
    wait_for 120 "job $2 runs again" start_now "$2"
    wait_for 120 "job $2 finishes" is "$2" COMPLETED
    [ "$(weights "$1")" = "$expected" ] || { echo "$1: the weights differ from the undisturbed run" >&2; exit 1; }
    say "$1: finished after $(restarts "$2") requeue(s) with the weights of the undisturbed run"
}

job=$(submit lost-node)
wait_for 60 "step 30 of job $job" past lost-node 30
# Lose the node: kill its daemon and everything that the daemon started.
of_node1=()
for proc in /proc/[0-9]*; do
    if { tr '\0' '\n' <"$proc/environ" | grep -qx 'SLURM_NODEID=1'; } 2>/dev/null; then
        # The launcher, its ranks, and their parents.
        of_node1+=("${proc#/proc/}" "$(sed -n 's/^PPid:\t//p' "$proc/status" 2>/dev/null || true)")
    fi
done
kill -9 "$node1" 2>/dev/null || true
for pid in "${of_node1[@]}"; do
    # The launcher's parent is slurmstepd; other processes are not killed.
    case $(cat "/proc/$pid/comm" 2>/dev/null) in
    lockstep | slurmstepd) kill -9 "$pid" 2>/dev/null || true ;;
    esac
done
say "killed node1 at step $(step lost-node)"
wait_for 60 "Slurm requeues job $job" requeued "$job" 1
start_node node1
say "restarted node1"
finish lost-node "$job"

job=$(submit preempted)
wait_for 60 "step 30 of job $job" past preempted 30
# Like a preemption: SIGTERM to the steps of the job, and time to save.
scancel --signal=TERM "$job"
say "preempted at step $(step preempted)"
wait_for 60 "job $job requeues itself" requeued "$job" 1
grep -q "stopped and saved; requeueing" "$dir/job-$job.txt"
finish preempted "$job"
