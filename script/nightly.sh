# shellcheck shell=bash
# shellcheck disable=SC2154  # target, logs and features are script/test's.
# The nightly stages of script/test, which sources this: long forms, floors of benchmarks, the fresh Debian 13 tree. All of them
# together take some hours on 2 cores; each runs alone as `script/test nightly:NAME` and, on a clean tree, records the
# commit that it passed on (`script/test --green` shows them).

# In their order: what fails fast comes first, the fresh trees last.
nightly_stages=(alone differential fuzz invariants race shipped crash power neighbour exitless core network elvis remote exits exits-clusters exits-sweeps demo-exits passthrough migrate memories moves two-hosts guests clusters soak roam hosts fresh fresh-reverse)

# Files of e2e/tests that are run at night only, or by name: they look closer at what others look at, too.
# shellcheck disable=SC2034  # script/test's.
nightly_e2e=(exits_guest firmware timer replay batch snapshots mediated_move e1000e vf_mishaps vf_vectors attended virsh two_hosts ixgbevf ixgbevf_coop)

# Seconds after which a nightly stage hangs.
nightly_limit() {
    case $1 in
    fresh) echo 5400 ;;
    fresh-reverse) echo 2400 ;;
    fuzz) echo 2400 ;;
    clusters) echo 3600 ;;
    moves | migrate) echo 9000 ;;
    memories) echo 10800 ;;
    *) echo 1800 ;;
    esac
}

# What is shipped, and the demo with it: other optimisation than what the tests run.
nightly_shipped() {
    cargo build --profile shipped -p ioplane -p ioplane-e2e --bins || return 1
    local out
    out=$(IOPLANE_BIN=$target/shipped/ioplane IOPLANE_BUILT=$target/shipped script/demo --json) || { echo "$out"; return 1; }
    echo "$out"
    grep -qE '"verified": *true' <<<"$out"
}

# Guided by coverage, from the corpus that all nights before have grown.
nightly_fuzz() {
    command -v c++ >/dev/null || { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y g++ >/dev/null; }
    command -v c++ >/dev/null || echo "SKIPPED: fuzzing guided by coverage: no C++ compiler (package g++)"
    export IOPLANE_FUZZ_CORPUS=${XDG_CACHE_HOME:-$HOME/.cache}/ioplane/corpus
    script/fuzz all "${IOPLANE_FUZZ_SECONDS:-45}"
}

# Each library crate builds by itself, with the features that it names and with none of them: the workspace as a whole unites features.
nightly_alone() {
    local manifest package
    for manifest in crates/*/Cargo.toml; do
        package=$(sed -n 's/^name = "\(ioplane[^"]*\)"$/\1/p' "$manifest" | head -n 1)
        [ -f "${manifest%Cargo.toml}src/lib.rs" ] || continue
        echo "$package"
        cargo check --quiet --lib -p "$package" || return 1
    done
    local feature
    for feature in clap schema; do
        cargo check --quiet --lib -p ioplane-api --features "$feature" || return 1
    done
}

# Long forms of tests that script/test has in short.

# Each night another seed, which the log shows.
nightly_differential() {
    IOPLANE_DIFFERENTIAL_RUNS=${IOPLANE_DIFFERENTIAL_RUNS:-1000000} \
        IOPLANE_DIFFERENTIAL_SEED=${IOPLANE_DIFFERENTIAL_SEED:-$(date -u +%Y%m%d)} \
        cargo test --workspace --features "$features" --test interpreter -- --nocapture
}
nightly_invariants() {
    IOPLANE_MUTATIONS=all cargo test --workspace --exclude ioplane-e2e --features "$features" --test mutations -- --nocapture
}
nightly_soak() { IOPLANE_SOAK_SECONDS=${IOPLANE_SOAK_SECONDS:-300} stage_e2e soak; }
# Names in a daemon, and in etcd.
nightly_hosts() { IOPLANE_SOAK_SECONDS=${IOPLANE_SOAK_SECONDS:-150} stage_e2e hosts; }
# For each of two kernels.
nightly_roam() { IOPLANE_SOAK_SECONDS=${IOPLANE_SOAK_SECONDS:-150} stage_e2e roam; }

# Clusters under OVMF, in a newer QEMU's snapshots, with ticks by a PIC in the VMM, and beside guests without the library; more replayed instructions; ticks
# of a guest that are fewer; batches.
nightly_clusters() {
    export IOPLANE_CLUSTERS=long
    stage_e2e snapshots && stage_e2e firmware && stage_e2e linux32 && stage_e2e replay && stage_e2e timer && stage_e2e batch
}

# What a profile finds in a guest is changed there and changed back, by ssh, by the agent and by a folder.
nightly_guests() { stage_e2e exits_guest; }

# A guest goes from host to host with a virtual function, its driver unmodified and cooperating, again and again: each time packets fall in other moments. And with mediated cards, and with the 82599's model as
# the hardware.
nightly_moves() {
    local round
    for round in $(seq "${IOPLANE_MOVES_ROUNDS:-2}"); do
        echo "round $round"
        stage_e2e vf_move && stage_e2e vf_mishaps && stage_e2e attended && stage_e2e virsh && stage_e2e coop_move || return 1
    done
    IOPLANE_MOVES_INSIDE=${IOPLANE_MOVES_INSIDE:-20} stage_e2e coop || return 1
    stage_e2e vf_vectors && stage_e2e mediated_move && stage_e2e e1000e && stage_e2e ixgbevf && stage_e2e ixgbevf_coop
}

# The same between two kernels over their network, by the certificates of both.
nightly_two-hosts() { stage_e2e two_hosts; }

# Guests that race, ten minutes in all.
nightly_race() {
    IOPLANE_RACE_SECONDS=${IOPLANE_RACE_SECONDS:-100} cargo test --workspace --features "$features" --test race -- --nocapture
}
# A thousand kills of the daemon, and the slow disk with them.
nightly_crash() {
    IOPLANE_CRASH_KILLS=${IOPLANE_CRASH_KILLS:-1000} cargo test --workspace --features "$features" --test crash -- --nocapture
}
# The power fails at every flush of a guest, on a block device and on ext4 (dm-log-writes in L1).
nightly_power() { IOPLANE_POWER_ROUNDS=${IOPLANE_POWER_ROUNDS:-12} stage_e2e power; }

# A benchmark's figures against the floors in bench/figures/src/goals/table.rs.
judged() {
    local json=$logs/$1.json
    if [ "$1" = network ]; then script/bootstrap --bench || return 1; fi
    # Not the build of the tests.
    env -u IOPLANE_BIN script/bench "$@" --json >"$json" || { cat "$json"; return 1; }
    cat "$json"
    script/bench judge "$json"
}
nightly_exitless() { judged exitless --quick; }
nightly_core() { judged core --quick; }
nightly_network() { judged network --quick; }
nightly_neighbour() { judged neighbour; }
nightly_elvis() { judged elvis && judged elvis-awake; }
nightly_remote() { judged remote --quick; }
nightly_exits() { judged exits --no-clusters; }
nightly_exits-clusters() { judged exits-clusters; }
nightly_exits-sweeps() { judged exits-sweeps; }
nightly_passthrough() { judged passthrough; }
nightly_migrate() { judged migrate; }
# Whatever a function wrote comes along, in 200 moves under traffic, each with both memories compared; and without the marks something is missed.
nightly_memories() {
    local json=$logs/memories.json
    env -u IOPLANE_BIN script/bench migrate --only pages --comparisons "${IOPLANE_COMPARISONS:-200}" --json >"$json" || { cat "$json"; return 1; }
    cat "$json"
    # Each has come to its end, nothing was missed, and the one without marks shows that the comparison can fail.
    [ "$(grep -c '"log": true' "$json")" = "${IOPLANE_COMPARISONS:-200}" ] && grep -q '"pages_missed": 0,' "$json" &&
        grep -A 1 '"log": false' "$json" | grep -q '"missed": [1-9]'
}
# What clustering saves of a stock VM's exits.
nightly_demo-exits() { stage_build && stage_demo --exits; }

# README's two commands as a new user runs them, in both orders.
nightly_fresh() { script/fresh demo-test; }
nightly_fresh-reverse() { script/fresh test-demo; }

# ---- which commit each passed on

green=${XDG_CACHE_HOME:-$HOME/.cache}/ioplane/green

record_green() {
    if [ -n "$(git status --porcelain --untracked-files=no)" ]; then
        echo "not recorded as green: the tree has changes that no commit has"
        return
    fi
    mkdir -p "$green"
    printf '%s %s %d s\n' "$(git rev-parse --short=12 HEAD)" "$(date -u +%Y-%m-%dT%H:%MZ)" "$2" >"$green/$1"
}

show_green() {
    local name
    for name in "${nightly_stages[@]}"; do
        printf '%-16s %s\n' "$name" "$(cat "$green/$name" 2>/dev/null || echo never)"
    done
}
