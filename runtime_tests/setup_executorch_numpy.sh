#!/bin/bash
# Set up ExecuTorch's torch-free runtime with a Python of its own, in one folder (x86-64, seconds, 100 MB).
#   runtime_tests/setup_executorch_numpy.sh DIR
# The package executorch-numpy-runtime wants Python 3.12 or newer; Debian 13's is unpacked beside its own libraries
# and changes nothing on this machine. Then: DIR/python SCRIPT.py
set -eu
DIR=$(realpath -m "$1"); VERSION=${EXECUTORCH_NUMPY_VERSION:-1.4.0}
mkdir -p "$DIR"/apt/{lists/partial,cache/archives/partial} "$DIR"/root/usr/{bin,lib,lib64,sbin} "$DIR"/{site,wheels}
touch "$DIR/apt/status"
cat > "$DIR/apt/sources.list" <<LIST
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main
LIST
cat > "$DIR/apt/apt.conf" <<CONF
APT::Architecture "amd64"; APT::Architectures { "amd64"; }; APT::Install-Recommends "0";
Dir::State "$DIR/apt"; Dir::State::status "$DIR/apt/status"; Dir::Cache "$DIR/apt/cache";
Dir::Etc::sourcelist "$DIR/apt/sources.list"; Dir::Etc::sourceparts "-";
CONF
apt-get -qq -c "$DIR/apt/apt.conf" update
apt-get -qq -y -d -c "$DIR/apt/apt.conf" install python3.13-minimal libpython3.13-stdlib libstdc++6 libgomp1 >/dev/null
for name in bin lib lib64 sbin; do ln -sfn "usr/$name" "$DIR/root/$name"; done
for deb in "$DIR"/apt/cache/archives/*.deb; do dpkg-deb --fsys-tarfile "$deb" | tar -x --keep-directory-symlink -C "$DIR/root"; done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.13 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 \
  -d "$DIR/wheels" "executorch-numpy-runtime==$VERSION" "numpy==2.3.5"
for wheel in "$DIR"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$DIR/site"; done
rm -rf "$DIR"/{apt,wheels}
cat > "$DIR/python" <<RUN
#!/bin/sh
export PYTHONHOME="$DIR/root/usr" PYTHONPATH="$DIR/site" PYTHONDONTWRITEBYTECODE=1
exec "$DIR/root/lib64/ld-linux-x86-64.so.2" --library-path "$DIR/root/usr/lib/x86_64-linux-gnu" \\
  "$DIR/root/usr/bin/python3.13" "\$@"
RUN
chmod +x "$DIR/python"
