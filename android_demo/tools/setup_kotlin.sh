#!/bin/bash
# A Kotlin compiler, JUnit, ONNX Runtime's Java classes and an android.jar, for `make test-android` without an Android SDK.
#   setup_kotlin.sh DIR
# Needs a JDK from 17 on, npm, and Debian with apt's package lists (apt-get update); with an Android SDK (ANDROID_HOME) and
# junit4 installed any Linux will do. What is there is not fetched again.
# Leaves DIR/kotlinc, DIR/jars/{junit4,hamcrest-core,onnxruntime-android,android}.jar and DIR/jni.
#
# Without an SDK the android.jar is that of API 23, the newest in Debian's archive. AndroidX, Compose and ExecuTorch are
# in none of these archives (tools/interfaces).
set -euo pipefail
KOTLIN=2.4.20
ONNXRUNTIME=0.4.9   # of the npm package; its AAR is ONNX Runtime 1.29.0

dir=$(realpath -m "${1:?give the folder to set up}")
mkdir -p "$dir/jars" "$dir/work"

unpack() {  # unpack NAME VERSION: an npm package into DIR/work/package
    rm -rf "$dir/work/package"
    (cd "$dir/work" && npm pack --silent "$1@$2" > /dev/null && tar -xzf "$1-$2.tgz" && rm "$1-$2.tgz")
}

if [ ! -x "$dir/kotlinc/bin/kotlinc" ]; then
    unpack kotlin-compiler "$KOTLIN"
    found=$(find "$dir/work/package" -type f -name kotlinc | head -n 1)
    rm -rf "$dir/kotlinc"
    mv "$(dirname "$(dirname "$found")")" "$dir/kotlinc"
    chmod +x "$dir"/kotlinc/bin/*
fi

if [ ! -e "$dir/jars/onnxruntime-android.jar" ]; then
    unpack com.github.asus4.onnxruntime "$ONNXRUNTIME"
    aar=$(find "$dir/work/package" -name '*.aar' | head -n 1)
    mkdir -p "$dir/jni"
    unzip -p "$aar" jni/x86_64/libonnxruntime4j_jni.so > "$dir/jni/libonnxruntime4j_jni.so"
    unzip -p "$aar" classes.jar > "$dir/work/onnxruntime.jar"
    mv "$dir/work/onnxruntime.jar" "$dir/jars/onnxruntime-android.jar"
fi

if [ ! -e "$dir/jars/hamcrest-core.jar" ]; then
    if [ ! -e /usr/share/java/junit4.jar ]; then
        sudo=$([ "$(id -u)" = 0 ] || echo sudo)
        $sudo apt-get install -y -qq --no-install-recommends junit4 libhamcrest-java > /dev/null
    fi
    cp -L /usr/share/java/junit4.jar "$dir/jars/"
    cp -L "$(ls /usr/share/java/hamcrest-core.jar /usr/share/java/hamcrest.jar 2> /dev/null | head -n 1)" "$dir/jars/hamcrest-core.jar"
fi

sdk=${ANDROID_HOME:-${ANDROID_SDK_ROOT:-}}
if [ ! -e "$dir/jars/android.jar" ] && [ -n "$sdk" ]; then
    newest=$(find "$sdk/platforms" -maxdepth 2 -name android.jar 2> /dev/null | sort -V | tail -n 1 || true)
    [ -z "$newest" ] || cp "$newest" "$dir/jars/android.jar"
fi
if [ ! -e "$dir/jars/android.jar" ]; then
    # Debian 11 is the last release with this package, so apt gets a state of its own for that release.
    apt="$dir/work/apt"
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
    touch "$apt/status"
    mirror=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/*.sources 2> /dev/null | head -n 1)
    mirror=${mirror:-$(awk '$1 == "deb" { print $2; exit }' /etc/apt/sources.list)}
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bullseye main" > "$apt/sources.list"
    cat > "$apt/apt.conf" <<CONF
Dir::State "$apt"; Dir::State::status "$apt/status"; Dir::Cache "$apt/cache";
Dir::Etc::sourcelist "$apt/sources.list"; Dir::Etc::sourceparts "-"; Acquire::Check-Valid-Until "false"; APT::Sandbox::User "root";
CONF
    apt-get -qq -c "$apt/apt.conf" update
    (cd "$apt" && apt-get -qq -c "$apt/apt.conf" download libandroid-23-java > /dev/null && dpkg-deb -x libandroid-23-java_*.deb x)
    cp -L "$(find "$apt/x" \( -name 'android.jar' -o -name 'com.android.android-*.jar' \) | head -n 1)" "$dir/jars/android.jar"
fi
rm -rf "$dir/work"
"$dir/kotlinc/bin/kotlinc" -version 2>&1
