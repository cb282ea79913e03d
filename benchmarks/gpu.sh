#!/usr/bin/env bash
# Everything of halfstep that needs a GPU, in one command of parts that take less than 9 minutes each: tests, CUDA graphs,
# benchmarks, and accuracy in real fp16 and bf16. A part writes its results as it goes. Needs python3 with torch and, for
# its full speed, Triton; no network, and nothing is installed: packages that are missing are unpacked from
# benchmarks/bare, which `pack` fills, into a temporary folder.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'TEXT'
benchmarks/gpu.sh [OPTIONS]         runs all parts, goes on after a failure, and prints a short table last
  --results DIR    where JSON and the log go (default: benchmarks/results/gpu)
  --data DIR       holds cifar10/ (default: $HALFSTEP_DATA, shared/data, ../shared/data or benchmarks/bare/data)
  --device cpu     runs the same on a CPU, to see that the script works; tests that need a GPU are skipped
  --quick          small sizes and few steps, to see that the script works
  --part NAME      only this part (tests, graph, optimizer_step, gpt2, gpt2_compiled, resnet50, accuracy, fp8, blocks);
                   repeatable; the summary is then summary-NAME.json
benchmarks/gpu.sh pack [VERSION]    where there is a network: fetches the packages for Python VERSION (3.12), and
                                    copies cifar10 if it is found, into benchmarks/bare, to be taken along
Another python than python3: PYTHON=/path/to/python benchmarks/gpu.sh
TEXT
}

python=${PYTHON:-python3}
bare=benchmarks/bare
# What halfstep and its tests need besides torch, Triton and numpy, as in pyproject.toml.
needed=('msgspec>=0.19' 'tomli-w>=1.0' 'typer>=0.12' 'rich>=13' 'pytest>=9.0' 'pytest-xdist>=3.6' 'hypothesis>=6.100')

find_data() {
  local place
  for place in "${HALFSTEP_DATA:-}" shared/data ../shared/data "$bare/data"; do
    if [ -n "$place" ] && [ -d "$place/cifar10" ]; then
      (cd "$place" && pwd)
      return
    fi
  done
}

pack() {
  local version=${1:-3.12} place data
  rm -rf "$bare/wheels"
  mkdir -p "$bare/wheels"
  local platforms=()
  for place in manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64; do platforms+=(--platform "$place"); done
  "$python" -m pip download --quiet --only-binary=:all: --implementation cp --python-version "$version" \
    "${platforms[@]}" --dest "$bare/wheels" "${needed[@]}" || exit 1
  data=$(find_data)
  if [ -n "$data" ] && [ "$data" != "$(pwd)/$bare/data" ]; then
    mkdir -p "$bare/data/cifar10" && cp -f "$data"/cifar10/*.npz "$bare/data/cifar10/"
  fi
  du -sh "$bare"/*
}

# has NAME [MAJOR]: whether python3 has a distribution, of at least a major version.
has() {
  "$python" -c 'import importlib.metadata as m, sys; sys.exit(int(m.version(sys.argv[1]).split(".")[0]) < int(sys.argv[2]))' \
    "$1" "${2:-0}" 2>/dev/null
}

# unpack_missing FOLDER: makes the packages that python3 lacks importable from FOLDER.
unpack_missing() {
  local wheel name requirement
  mkdir -p "$1"
  for wheel in "$bare"/wheels/*.whl; do
    name=$(basename "$wheel")
    name=${name%%-*}
    # An old pytest comes with old packages of its own.
    if [ -f "$wheel" ] && ! { has pytest 9 && has "$name"; }; then "$python" -m zipfile -e "$wheel" "$1"; fi
  done
  for requirement in "${needed[@]}"; do
    name=${requirement%%>=*}
    PYTHONPATH="$1${PYTHONPATH:+:$PYTHONPATH}" has "$name" && continue
    echo "the package $name is missing, and $bare/wheels has none: benchmarks/gpu.sh pack fetches it"
  done
}

device=cuda quick="" results=benchmarks/results/gpu data="" parts=()
while [ $# -gt 0 ]; do
  case "$1" in
    pack)
      pack "${2:-}"
      exit
      ;;
    --device) device=$2 && shift 2 ;;
    --results) results=$2 && shift 2 ;;
    --data) data=$2 && shift 2 ;;
    --part) parts+=("$2") && shift 2 ;;
    --quick) quick=yes && shift ;;
    *)
      usage
      [ "$1" = help ] || [ "$1" = --help ] || [ "$1" = -h ]
      exit
      ;;
  esac
done

mkdir -p "$results" || exit 1
results=$(cd "$results" && pwd)
[ -n "$data" ] || data=$(find_data)
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
summary=summary$(printf -- '-%s' ${parts[@]+"${parts[@]}"})
summary=${summary%-}
rm -f "$results/$summary.json"
log=$results/${summary/summary/log}.txt
: >"$log"
unpack_missing "$room/site" 2>&1 | tee -a "$log"
PYTHONPATH="$(pwd):$room/site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
"$python" hatch_build.py # the loops for the CPU, beside their sources
: >"$room/parts.txt"
: >"$room/left_out.txt"

# part NAME SECONDS COMMAND...: runs one part, at most so long, and goes on whatever becomes of it. What an earlier run
# has left of it does not count.
part() {
  local name=$1 limit=$2 code start=$SECONDS
  shift 2
  if [ ${#parts[@]} -gt 0 ] && [[ " ${parts[*]} " != *" $name "* ]]; then
    return
  fi
  rm -f "$results/$name.json" "$results/$name"/*-seed0.json
  printf '\n== %s (at most %s s): %s\n' "$name" "$limit" "$*" | tee -a "$log"
  timeout --kill-after=5 "$limit" "$@" 2>&1 | tee -a "$log"
  code=${PIPESTATUS[0]}
  echo "$name $code $((SECONDS - start)) $limit" >>"$room/parts.txt"
}

# leave_out WORKLOAD WHY...: what the accuracy runs do without.
leave_out() {
  echo "$*" >>"$room/left_out.txt"
  echo "$1 is left out: ${*:2}" | tee -a "$log"
}

workers=$(("$(nproc)" / 2))
workers=$((workers > 8 ? 8 : workers))
spread=()
if "$python" -c 'import xdist' 2>/dev/null && [ "$workers" -gt 1 ]; then spread=(-n "$workers"); fi
mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests | grep -v tests/contracts/test_cuda.py | sort)
test_options=(-m "gpu and not slow" -p no:cacheprovider -q --tb=short -ra)

sizes=(--device "$device")
steps=(--device "$device")
accuracy=(--device "$device")
layers=(--device "$device" --set d=1024 --set heads=16 --set layers=6 --set length=512 --set batch=16 --seeds 1)
blocks=(--device "$device")
if [ -n "$quick" ]; then
  sizes+=(--numel 5000 --rounds 1)
  steps+=(--layers 1 --context 16 --vocabulary 64 --width 12 --batch 2 --pixels 72 --steps 2 --low bf16)
  accuracy+=(--steps 2 --set d=32 --set layers=1 --set heads=2 --set length=16 --set eval_windows=8)
  layers=(--device "$device" --set d=32 --set heads=2 --set layers=1 --set length=16 --set batch=2 --seeds 1 --steps 1)
  blocks+=(--numel 5000 --seconds 0)
  test_options+=(-k "waits_for_nothing or read_pass_on_cuda" -m "gpu and not slow and not silicon")
  files=(tests/kernels/test_triton.py)
fi
workloads=(--workload char_lm)
if [ -n "$quick" ]; then
  leave_out cifar_resnet --quick
elif [ -n "$data" ]; then
  workloads+=(--workload cifar_resnet --data "$data")
else
  leave_out cifar_resnet "no cifar10 folder was found (see --data)"
fi

compiled=bf16
[ -z "$quick" ] || compiled=none

part tests 530 "$python" -m pytest "${test_options[@]}" ${spread[@]+"${spread[@]}"} --junitxml "$room/tests.xml" "${files[@]}"
part graph 120 "$python" -m pytest "${test_options[@]}" ${spread[@]+"${spread[@]}"} --junitxml "$room/graph.xml" tests/contracts/test_cuda.py
part optimizer_step 240 "$python" benchmarks/optimizer_step.py "${sizes[@]}" --json "$results/optimizer_step.json"
part gpt2 300 "$python" benchmarks/train_step.py --workload gpt2 --compiled none "${steps[@]}" --json "$results/gpt2.json"
part gpt2_compiled 300 "$python" benchmarks/train_step.py --workload gpt2 "${steps[@]}" --low bf16 --compiled "$compiled" \
  --json "$results/gpt2_compiled.json"
part resnet50 240 "$python" benchmarks/train_step.py --workload resnet50 --compiled none "${steps[@]}" --json "$results/resnet50.json"
part accuracy 400 "$python" benchmarks/accuracy.py "${accuracy[@]}" --seed 0 "${workloads[@]}" --results "$results/accuracy"
part fp8 300 "$python" benchmarks/fp8.py "${layers[@]}" --json "$results/fp8.json"
part blocks 120 "$python" benchmarks/blocks.py "${blocks[@]}" --json "$results/blocks.json"

printf '\n== summary\n' | tee -a "$log"
timeout --kill-after=2 60 "$python" benchmarks/gpu_summary.py --device "$device" --results "$results" --name "$summary" --room "$room" 2>&1 | tee -a "$log"
exit "${PIPESTATUS[0]}"
