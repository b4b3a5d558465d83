#!/usr/bin/env bash
# Packs the test binaries for a machine without cargo, such as a GPU machine:
#
#     scripts/pack-tests.sh OUT.tar.xz [PACKAGE…]        # default: kernels, model, trainer
#
# There: tar -xf OUT.tar.xz && LOCKSTEP_DEVICE=cuda tests/run [FILTER…]
set -euo pipefail
cd "$(dirname "$0")/.."

out="$(realpath "${1:?usage: scripts/pack-tests.sh OUT.tar.xz [PACKAGE…]}")"
shift
packages=("$@")
[ ${#packages[@]} -gt 0 ] || packages=(lockstep-kernels lockstep-model lockstep-trainer)

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/tests"
for package in "${packages[@]}"; do
    cargo test --no-run --message-format=json -p "$package" 2>/dev/null |
        python3 -c '
import json, sys
for line in sys.stdin:
    artifact = json.loads(line)
    if artifact.get("profile", {}).get("test") and artifact.get("executable"):
        print(artifact["target"]["name"], artifact["executable"])' |
        while read -r name binary; do
            cp "$binary" "$folder/tests/$package-$name"
            strip "$folder/tests/$package-$name"
        done
done
mkdir "$folder/tests/fixtures"
cp -r fixtures/pytorch "$folder/tests/fixtures/"
# Tests write to the folder that cargo named when they were compiled.
realpath -m "${CARGO_TARGET_DIR:-target}/tmp" > "$folder/tests/writes-to"
cat > "$folder/tests/run" <<'RUN'
#!/usr/bin/env bash
# Runs all packed tests. Arguments are passed to each binary, e.g. a filter.
cd "$(dirname "$0")"
mkdir -p "$(cat writes-to)"
export LOCKSTEP_FIXTURES="$PWD/fixtures"
failed=0
for binary in ./lockstep-*; do
    echo "== $binary"
    "$binary" "$@" || failed=1
done
exit $failed
RUN
chmod +x "$folder/tests/run"
tar -C "$folder" -cJf "$out" tests
echo "$out: $(du -h "$out" | cut -f1)"
