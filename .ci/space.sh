# shellcheck shell=bash
# Space for the build and the tests: on the disk, or in memory where the disk has too little.
#
#   disk has room ............. build and caches in SPINIO_CI_CACHE, temporary files in TMPDIR
#   builds of other checkouts . removed first: each has a directory of its own, and a machine that is kept collects them
#   still too little .......... an ext4 image in /dev/shm (a loop device, so that the tests have a disk's file system)

# The largest build directory of a whole run, and the temporary files of its largest section, in MiB.
readonly BUILD_MIB=9000 TEMPORARY_MIB=3000

# Free MiB on the file system of a directory.
room() {
  df --output=avail -BM "$1" | tail -n 1 | tr -dc '0-9'
}

# An existing build needs no more space.
enough() {
  local built=0
  [[ -d $CARGO_TARGET_DIR ]] && built="$(du -sm "$CARGO_TARGET_DIR" | cut -f1)"
  if [[ $(stat -c %d "$CARGO_TARGET_DIR") == "$(stat -c %d "$TMPDIR")" ]]; then
    (($(room "$TMPDIR") + built >= BUILD_MIB + TEMPORARY_MIB))
  else
    (($(room "$CARGO_TARGET_DIR") + built >= BUILD_MIB && $(room "$TMPDIR") >= TEMPORARY_MIB))
  fi
}

# Removes builds that no run uses (a run holds the lock of its own), and what killed runs left.
drop_unused() {
  local build memory
  for memory in /run/spinio-ci.*; do
    [[ -d $memory && ! -d /proc/${memory##*.} ]] || continue
    free_memory "$memory"
  done
  find "${TMPDIR%/*}" -mindepth 1 -maxdepth 1 -name 'spinio-ci.*' -mtime +0 -exec rm -rf --one-file-system {} + || true
  for build in "$TARGETS"/*/; do
    [[ -d $build && ${build%/} != "$CARGO_TARGET_DIR" ]] || continue
    (flock -n 9 && rm -rf "$build") 9>"${build%/}.lock" || true
  done
}

# Mounts the image at DIRECTORY; `free_memory` undoes it.
use_memory() {
  local directory="$1" image="/dev/shm/spinio-ci.$$" need=$((BUILD_MIB + TEMPORARY_MIB + 3000))
  if ((EUID != 0)) || (($(room /dev/shm) < need)); then return 1; fi
  truncate -s "${need}M" "$image"
  mkfs.ext4 -q -m 0 -E lazy_itable_init=1,lazy_journal_init=1 "$image" || { rm -f "$image"; return 1; }
  mkdir -p "$directory"
  # The image lives as long as the mount.
  mount -o loop,discard "$image" "$directory" || { rm -f "$image"; return 1; }
  rm -f "$image"
}

free_memory() {
  if mountpoint -q "$1"; then umount -l "$1"; fi
  if [[ -d $1 ]]; then rmdir "$1"; fi
}

space_report() {
  printf 'the build needs %d MiB in %s (%d are free), the tests %d in %s (%d are free)\n' "$BUILD_MIB" "$CARGO_TARGET_DIR" \
    "$(room "$CARGO_TARGET_DIR")" "$TEMPORARY_MIB" "$TMPDIR" "$(room "$TMPDIR")"
}
