# shellcheck shell=bash
# What the examples in the directories next to this file have in common: finds the command, compiles the programs,
# mounts, starts programs that take turns, and removes everything at the end. Sourced, with the example's name.
#
#   SPINIO_COMMAND           the command `spinio`, if not the one of `cargo build --release` or of PATH
#   CC, CXX, NVCC            compilers
#   TMPDIR                   where the mount and the programs are, for as long as the example runs (default: /tmp)

example=$1
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
declare -A to=() from=() pid=()
mounted=""

die() {
    echo "$example: $*" >&2
    exit "${status:-1}"
}

usage() {
    status=2 die "$* (--help shows the options)"
}

# The comment at the beginning of the script is its help.
show_help() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
}

# The value of an option, which must be a whole number from LOW to HIGH.
number() { # NAME VALUE LOW HIGH
    if ! [[ $2 =~ ^[0-9]{1,10}$ ]] || ((10#$2 < $3 || 10#$2 > $4)); then
        usage "$1 takes a number from $3 to $4, not '$2'"
    fi
}

# Sets $spinio, $library and $work, a directory that is removed at the end.
prepare() {
    local built=${CARGO_TARGET_DIR:-$root/target}/release/spinio
    spinio=${SPINIO_COMMAND:-}
    if [[ -z $spinio ]]; then
        if [[ -x $built ]]; then spinio=$built; else spinio=$(command -v spinio || true); fi
    fi
    if ! command -v "${spinio:-spinio}" >/dev/null; then
        die "there is no command '${spinio:-spinio}'. Build it (cargo build --release), or name it in SPINIO_COMMAND"
    fi
    # The command knows where its library is.
    library=${SPINIO_LIBRARY:-$(env -u LD_PRELOAD "$spinio" run -- printenv LD_PRELOAD)} ||
        die "'$spinio' finds no libspinio.so"
    work=$(mktemp -d "${TMPDIR:-/tmp}/spinio-$example.XXXXXX") || exit
    trap clean EXIT
    trap 'stop 130' INT
    trap 'stop 143' TERM HUP
}

# Compiles an ordinary C program, without any code of SPIN.
compile_c() { # PROGRAM SOURCE
    local cc=${CC:-cc}
    command -v "$cc" >/dev/null || status=4 die "there is no C compiler '$cc' (Debian: apt install gcc libc6-dev)"
    "$cc" -std=gnu11 -O2 -Wall -Wextra -o "$work/$1" "$here/$2" || status=4 die "cannot compile $2"
}

# Compiles a program with kernels: for the GPU if there are one and nvcc, else for the emulated device. Sets $gpu.
compile_gpu() { # PROGRAM SOURCE
    local headers=(-I "$root/device/include" -I "$root/crates/capi/include") nvcc cxx=${CXX:-c++}
    # Not RUNPATH, which LD_LIBRARY_PATH precedes.
    local linked=(--disable-new-dtags -rpath "$(dirname "$library")")
    nvcc=$(command -v "${NVCC:-nvcc}" || { [[ -z ${NVCC:-} ]] && command -v /usr/local/cuda/bin/nvcc; } || true)
    if [[ -e /dev/nvidiactl && -n $nvcc ]]; then
        gpu="the first CUDA GPU"
        "$nvcc" -std=c++17 -O2 "${headers[@]}" -Xcompiler -pthread -o "$work/$1" "$here/$2" "$library" \
            "${linked[@]/#/-Xlinker=}" || status=4 die "cannot compile $2"
        return
    fi
    gpu="an emulated device, a GPU in software"
    [[ ! -e /dev/nvidiactl ]] || gpu+=": there is a GPU, but no nvcc"
    command -v "$cxx" >/dev/null || status=4 die "there is no C++ compiler '$cxx' (Debian: apt install g++)"
    "$cxx" -std=c++17 -O2 -Wall -Wextra -pthread "${headers[@]}" -o "$work/$1" -x c++ "$here/$2" -x none "$library" \
        "${linked[@]/#/-Wl,}" || status=4 die "cannot compile $2"
}

# Mounts GAIA over $work/mount.
mount_gaia() {
    mkdir "$work/mount"
    mounted=$work/mount
    "$spinio" gaia mount "$mounted" || die "cannot mount GAIA"
}

unmount_gaia() {
    "$spinio" gaia umount "$mounted" || die "cannot unmount $mounted"
    mounted=""
}

size() { # BYTES
    awk -v n="$1" 'BEGIN {if (n < 1048576) printf "%.3g KiB", n / 1024; else printf "%.2f MiB", n / 1048576}'
}

# Starts a program that takes turns: a line to its stdin, and its answer of one line.
start() { # NAME COMMAND...
    local name=$1 fd
    shift
    mkfifo "$work/$name.in" "$work/$name.out"
    # For reading too, so that a program that has ended is no SIGPIPE here.
    exec {fd}<>"$work/$name.in"
    to[$name]=$fd
    (
        # A program's stdin ends only if no other program has it open.
        for fd in "${to[@]}" "${from[@]}"; do exec {fd}>&-; done
        exec "$@" <"$work/$name.in" >"$work/$name.out"
    ) &
    pid[$name]=$!
    exec {fd}<"$work/$name.out"
    from[$name]=$fd
}

tell() { # NAME LINE
    echo "$2" >&"${to[$1]}"
}

# Sets $answer. A program that fails has said why on stderr.
hear() { # NAME
    # shellcheck disable=SC2034 # used by the scripts that source this
    IFS= read -r answer <&"${from[$1]}" || die "the program '$1' has failed"
}

# Ends the stdin of a program, and waits for it.
finish() { # NAME
    local fd=${to[$1]}
    exec {fd}>&-
    unset "to[$1]"
    wait "${pid[$1]}" || die "the program '$1' has failed"
    unset "pid[$1]"
}

# A second signal must not end the cleaning.
stop() { # STATUS
    trap '' INT TERM HUP
    exit "$1"
}

clean() {
    local ended=$? one
    trap '' INT TERM HUP
    trap - EXIT
    for one in "${pid[@]}"; do
        if kill "$one" 2>/dev/null; then wait "$one" 2>/dev/null || true; fi
    done
    if [[ -n $mounted ]]; then
        "$spinio" gaia umount "$mounted" 2>/dev/null || umount -l "$mounted" 2>/dev/null || true
    fi
    rm -rf --one-file-system "$work"
    exit "$ended"
}
