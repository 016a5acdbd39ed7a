#!/bin/bash
# What of the demo can be checked without a phone: `make test-android`.
#   test.sh OUT [BUNDLE...]
# Compiles :pitcore, :pitruntime and :app with a real Kotlin compiler, and runs the tests of :pitcore on the shared
# vectors and those of :pitruntime on real bundles in ONNX Runtime. OUT keeps what is fetched and built. The bundles
# named are run too; a sample's parity takes minutes.
# PYTHON names pit-deploy's Python; SAMPLE a checkpoint whose tokenizer is compared, by default the sample model's.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
repo=$(dirname "$here")
out=$(realpath -m "${1:?give a folder for what is fetched and built}")
shift
python=${PYTHON:-$repo/.venv/bin/python}
vectors=$repo/runtime_tests/vectors
tools=$out/tools
jars=$tools/jars
mkdir -p "$out"
export JAVA_OPTS=${JAVA_OPTS:--XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xmx1500m}
export OMP_NUM_THREADS=1

"$here/tools/setup_kotlin.sh" "$tools"
kotlinc=$tools/kotlinc/bin/kotlinc
stdlib=$tools/kotlinc/lib/kotlin-stdlib.jar

echo "== token ids of Hugging Face's tokenizers"
"$python" "$vectors/make_tokens.py" --tokenizer "$vectors"/tokenizers/*.json --count 6000 --out "$out/tokens_small.json"
sample=${SAMPLE:-$out/sample_tokenizer}
[ -e "$sample/tokenizer.json" ] || "$python" "$here/tools/sample_tokenizer.py" "$sample"
"$python" "$vectors/make_tokens.py" --tokenizer "$sample/tokenizer.json" --count 6000 --out "$out/tokens_sample.json"

echo "== bundles, and what Python makes of them"
"$python" "$here/tools/run_bundles.py" "$out/bundles" "$@" 2> "$out/bundles.log" || { cat "$out/bundles.log"; exit 1; }
bundles=$(find "$out/bundles" -maxdepth 1 -name '*.expected.json' | sed 's/\.expected\.json$//' | paste -sd: -)

# newer JAR INPUT...: whether an input, or a folder in it, changed since the jar was made
newer() {
    [ ! -e "$1" ] || [ -n "$(find "${@:2}" -newer "$1" -print -quit)" ]
}

# compile NAME CLASSPATH SOURCE...: warnings are shown only where something fails
compile() {
    local classpath
    IFS=: read -ra classpath <<< "$2"
    newer "$out/$1.jar" "${classpath[@]}" "${@:3}" || return 0
    echo "== compiling $1"
    "$kotlinc" -jvm-target 17 -cp "$2" -d "$out/new.jar" "${@:3}" > "$out/$1.log" 2>&1 || { cat "$out/$1.log"; exit 1; }
    mv "$out/new.jar" "$out/$1.jar"
}

junit=$jars/junit4.jar:$jars/hamcrest-core.jar
compile pitcore "$jars/junit4.jar" "$here/pitcore/src"
interfaces=$here/tools/interfaces
if newer "$out/executorch.jar" "$interfaces/executorch/org"; then
    rm -rf "$out/executorch"
    javac -d "$out/executorch" "$interfaces"/executorch/org/pytorch/executorch/*.java
    jar --create --file "$out/executorch.jar" -C "$out/executorch" .
fi
runtime=$out/pitcore.jar:$out/executorch.jar:$jars/onnxruntime-android.jar
compile pitruntime "$runtime:$jars/android.jar:$jars/junit4.jar" "$here/pitruntime/src" "$interfaces/executorch/ExecutorchBackendTest.kt"
compile app "$out/pitruntime.jar:$runtime:$jars/android.jar" "$here/app/src/main/kotlin" "$interfaces/androidx"

# tests MODULE CLASSPATH [OPTION...]: all test classes of the module
tests() {
    local classes
    classes=$(unzip -Z1 "$out/$1.jar" | sed -n '/\$/d; s#/#.#g; s#\(.*Test\)\.class$#\1#p' | sort)
    echo "== tests of $1"
    # shellcheck disable=SC2086 -- a class a word
    java -XX:+UseSerialGC "${@:3}" -cp "$out/$1.jar:$2:$stdlib:$junit" org.junit.runner.JUnitCore $classes
}

resources=$here/pitcore/src/main/resources:$repo/pit_deploy/schemas
rm -f "$out/benchmark_results.json"
tests pitcore "$resources" "-Dvectors=$vectors" "-Dtokens.small=$out/tokens_small.json" \
    "-Dtokens.sample=$out/tokens_sample.json" "-Dresults=$out/benchmark_results.json"
"$python" -c "
import json, sys
from pit_deploy.benchmark.report import BenchReport
BenchReport.model_validate(json.load(open(sys.argv[1])))
print('the app\'s benchmark_results.json is a bench object')" "$out/benchmark_results.json"

"$python" "$here/tools/onnxruntime_jvm.py" "$tools/jni/libonnxruntime4j_jni.so" "$out/onnxruntime"
LD_LIBRARY_PATH=$out/onnxruntime tests pitruntime "$runtime:$resources" "-Donnxruntime.native.path=$out/onnxruntime" \
    "-Dvectors=$vectors" "-Dbundles=$bundles" "-Dbroken=$out/bundles/broken"
