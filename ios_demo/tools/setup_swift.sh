#!/bin/bash
# A Swift 6 toolchain for Linux in one folder: a minimal Debian 13 with its package swiftlang, used by chroot.
#
#   ios_demo/tools/setup_swift.sh [DIR]      DIR: $PIT_SWIFT, or build/swift in the repository
#
# Debian or Ubuntu, root (for debootstrap and chroot), 3.3 GB of disk, two to five minutes. What is there already is
# kept. Where `swift` of version 6 is installed, nothing of this is needed: swift.sh takes that one. Mounts live in a
# mount namespace of their own and end with the script, so that the folder can be deleted like any other.
set -eu

repository=$(cd "$(dirname "$0")/../.." && pwd)
DIR=$(realpath -m "${1:-${PIT_SWIFT:-$repository/build/swift}}")

if [ "$(id -u)" != 0 ]; then
  echo "setup_swift.sh needs root for debootstrap and chroot; run it with sudo, or install Swift 6 from swift.org." >&2
  exit 2
fi
if [ -z "${PIT_SWIFT_NAMESPACE:-}" ]; then
  PIT_SWIFT_NAMESPACE=1 exec unshare --mount --propagation private "$0" "$DIR"
fi

mirror=$(cat /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null \
  | grep -o 'https\?://[^ ]*debian.org/debian\b' | head -n 1 || true)
mirror=${mirror:-http://deb.debian.org/debian}

if [ ! -e "$DIR/.bootstrapped" ]; then
  command -v debootstrap >/dev/null || apt-get install -y -qq --no-install-recommends debootstrap >/dev/null
  rm -rf "$DIR"
  mkdir -p "$(dirname "$DIR")"
  debootstrap --variant=minbase trixie "$DIR" "$mirror" >"$DIR.log" 2>&1 \
    || { tail -n 5 "$DIR.log" >&2; echo "debootstrap failed; the whole log is $DIR.log." >&2; exit 1; }
  touch "$DIR/.bootstrapped"
fi
mountpoint -q "$DIR/proc" || mount -t proc proc "$DIR/proc"
cp /etc/resolv.conf "$DIR/etc/" 2>/dev/null || true
cp /etc/apt/apt.conf.d/*proxy* "$DIR/etc/apt/apt.conf.d/" 2>/dev/null || true
if ! chroot "$DIR" sh -c 'command -v swiftc' >/dev/null; then
  {
    chroot "$DIR" apt-get update -qq
    chroot "$DIR" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      swiftlang swiftlang-dev libc6-dev libstdc++-12-dev binutils gcc git
    chroot "$DIR" apt-get clean
  } >>"$DIR.log" 2>&1 || { tail -n 5 "$DIR.log" >&2; echo "The log is $DIR.log." >&2; exit 1; }
fi
chroot "$DIR" swiftc --version
