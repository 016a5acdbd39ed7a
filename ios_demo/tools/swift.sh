#!/bin/bash
# swift.sh ARGS...: run `swift ARGS` in ios_demo/, with the installed Swift 6 or the one of setup_swift.sh.
#   TOOL=swiftc swift.sh ...      another program of the toolchain
# Build products go to build/ios_demo. Exit status 3: there is no toolchain.
set -eu

demo=$(cd "$(dirname "$0")/.." && pwd)
repository=$(dirname "$demo")
tool=${TOOL:-swift}

if command -v "$tool" >/dev/null && "$tool" --version 2>&1 | grep -q 'Swift version 6'; then
  cd "$demo"
  exec "$tool" "$@"
fi
DIR=$(realpath -m "${PIT_SWIFT:-$repository/build/swift}")
if [ ! -x "$DIR/usr/bin/$tool" ] && ! chroot "$DIR" sh -c "command -v $tool" >/dev/null 2>&1; then
  echo "There is no Swift 6 toolchain; make one with: sudo ios_demo/tools/setup_swift.sh" >&2
  exit 3
fi
if [ -z "${PIT_SWIFT_NAMESPACE:-}" ]; then
  PIT_SWIFT_NAMESPACE=1 exec unshare --mount --propagation private "$0" "$@"
fi
# The repository is at the same path inside, so that messages name the real files.
mount -t proc proc "$DIR/proc"
mkdir -p "$DIR$repository"
mount --bind "$repository" "$DIR$repository"
if [ -n "${PIT_VECTORS:-}" ]; then
  mkdir -p "$DIR$PIT_VECTORS"
  mount --bind "$PIT_VECTORS" "$DIR$PIT_VECTORS"
fi
exec chroot "$DIR" bash -c 'cd "$1" && shift && exec "$@"' _ "$demo" "$tool" "$@"
