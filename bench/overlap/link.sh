# Source this file to get two "hosts" with a slow link: network namespaces $a and $b connected by a veth pair of
# 1 Gbit/s, and a temporary folder. All are removed at exit. Prints a message and exits if they cannot be created.
a=lockstep-a-$$ b=lockstep-b-$$

skip() { echo "skipped: $1"; exit 0; }
[[ $(id -u) == 0 ]] || skip "namespaces and link speeds are root's to make; run it as root"
for tool in ip tc python3; do command -v "$tool" > /dev/null || skip "there is no $tool here"; done
[[ -x $lockstep ]] || { echo "no binary at $lockstep; run cargo build --release" >&2; exit 1; }

work=$(mktemp -d)
clean() {
    ip netns del "$a" 2> /dev/null || true
    ip netns del "$b" 2> /dev/null || true
    rm -rf "$work"
}
trap clean EXIT
cd "$work"

# 1 ms delay each way if the kernel supports it; otherwise only the rate is limited.
slow() {
    ip netns exec "$1" tc qdisc add dev "$2" root netem rate 1gbit delay 1ms limit 100000 2> /dev/null \
        || ip netns exec "$1" tc qdisc add dev "$2" root tbf rate 1gbit burst 128kb latency 100ms 2> /dev/null \
        || skip "this kernel has neither netem nor tbf"
}
ip netns add "$a" && ip netns add "$b" || skip "this kernel makes no network namespaces"
ip link add veth0 netns "$a" type veth peer name veth0 netns "$b"
for side in "$a 1" "$b 2"; do
    read -r ns number <<< "$side"
    ip -n "$ns" addr add "10.77.0.$number/24" dev veth0
    ip -n "$ns" link set veth0 up
    ip -n "$ns" link set lo up
    slow "$ns" veth0
done
echo "link: $(ip netns exec "$a" tc qdisc show dev veth0)"
(umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > token)

# Runs one rank in each namespace, over TCP. Writes the output of rank 0, the measurement, to NAME.jsonl.
together() {
    local name=$1 pids=() node=0 failed=0
    shift
    for ns in "$a" "$b"; do
        ip netns exec "$ns" "$lockstep" launch --nnodes 2 --node-rank $node --nproc-per-node 1 \
            --master-addr 10.77.0.1 --token-file token --log-dir "logs-$node" -- \
            "${bench[@]}" "$@" > "out-$node" 2> "err-$node" &
        pids+=($!)
        node=$((node + 1))
    done
    for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
    [[ $failed == 0 ]] || { tail -n 5 err-* >&2; exit 1; }
    grep -h '^{' out-0 >> "$name.jsonl"
}
