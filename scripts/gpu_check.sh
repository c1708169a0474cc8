#!/usr/bin/env bash
# One pass over what a machine with a CUDA device can check, in under eight minutes; see --help.
set -u -o pipefail

usage() {
    cat <<'TEXT'
usage: scripts/gpu_check.sh [--device cuda] [--shape k3-truncated] [--python .venv/bin/python] [--out build/gpu-check]

Runs, on one GPU, within eight minutes in all:
  1. the gates of exactness (pytest -m gates; they compare on the CPU) and the tests marked gpu,
  2. outrider verify of the shipped pair on the GPU, in float32 and in bfloat16: whether output with and
     without drafts is equal there. Exactness is promised on CPUs only, so this is told, not required,
  3. outrider bench step of the shape k3-truncated: four layers of K3 in their real sizes, 224 random MXFP4
     experts, kept packed (22 GB on disk in the user's cache folder, written at the first run).
Then prints one table. All operations are the PyTorch reference forms: no Triton or fla kernel has the
geometry that keeps a row's bits its own, so none is put in.

Status 0 = all ran and the gates hold, 1 = something failed, 3 = there is no CUDA device.

The random weights are drawn on the CPU, one thread: expect one to two minutes of the first run for them.
--device cpu with a small --shape (a name or a .json file, see outrider bench step) tries the script itself.

This script has NOT been run on a GPU: none was at hand when it was written. With --device cpu and a small shape
its steps were started and its table printed, on a busy machine where the longer ones met their time limits.
TEXT
}

device=cuda
python=.venv/bin/python
out=build/gpu-check
shape=k3-truncated
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --device) device=${2:?--device needs a value}; shift 2 ;;
        --shape) shape=${2:?--shape needs a value}; shift 2 ;;
        --python) python=${2:?--python needs a value}; shift 2 ;;
        --out) out=${2:?--out needs a value}; shift 2 ;;
        *) echo "gpu_check: unknown argument $1; see --help" >&2; exit 2 ;;
    esac
done

cd "$(dirname "$0")/.." || exit 1
if ! command -v "$python" >/dev/null; then
    echo "gpu_check: no Python at $python; run make setup, or give --python" >&2
    exit 2
fi
if [ "$device" != cpu ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: PyTorch sees no CUDA device here; nothing was checked" >&2
    exit 3
fi

mkdir -p "$out"
deadline=$(($(date +%s) + 470))
failed=0

# run NAME MOST_SECONDS COMMAND...: its status goes to NAME.status, its words to NAME.log
run() {
    local name=$1 most=$2 left status
    shift 2
    left=$((deadline - $(date +%s)))
    if [ "$left" -lt 5 ]; then
        echo "not run: time is up" >"$out/$name.status"
        failed=1
        return
    fi
    [ "$most" -gt "$left" ] && most=$left
    echo "gpu_check: $name ..." >&2
    timeout -k 5 "$most" "$@" >"$out/$name.log" 2>&1
    status=$?
    case $status in
        0) echo ok ;;
        5) echo "no such test" ;; # pytest found nothing to run
        124) echo "stopped after $most s" ;;
        *) echo "status $status" ;;
    esac >"$out/$name.status"
    return $status
}

cli=("$python" -c 'import sys; from outrider.cli import main; sys.exit(main())')
rm -f "$out"/*.status "$out/step.json"
run step 330 "${cli[@]}" bench step --random "$shape" --device "$device" --experts packed \
    --rows 1,2,4,8,16,32,64 --slots 1,8 --context 128,1024 --repeats 10 --json "$out/step.json" || failed=1
run gates 180 env OMP_NUM_THREADS=4 "$python" -m pytest -q -m "gates and not slow" || failed=1
run gpu-tests 60 "$python" -m pytest -q -m gpu
[ $? -le 0 ] || [ "$(cat "$out/gpu-tests.status")" = "no such test" ] || failed=1
for dtype in float32 bfloat16; do
    run "verify-$dtype" 90 "${cli[@]}" verify models/k3-small --drafter models/k3-small-dspark --device "$device" \
        --dtype "$dtype" --max-tokens 8 --json "$out/verify-$dtype.json"
done

"$python" - "$out" "$device" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

out, device = Path(sys.argv[1]), sys.argv[2]
name = "the CPU" if device == "cpu" else torch.cuda.get_device_name(device)
table = Table(title=f"gpu_check on {name}", title_justify="left")
for heading in ("check", "outcome"):
    table.add_column(heading)
for name in ("gates", "gpu-tests", "verify-float32", "verify-bfloat16", "step"):
    status = out / f"{name}.status"
    table.add_row(name, status.read_text().strip() if status.is_file() else "not run")
    report = out / f"{name}.json"
    if name.startswith("verify") and report.is_file() and report.stat().st_size:
        table.add_row("", "output equal with and without drafts: " + str(json.loads(report.read_text())["identical"]))
steps = out / "step.json"
if steps.is_file() and steps.stat().st_size:
    table.add_section()
    for point in json.loads(steps.read_text())["points"]:
        table.add_row(
            f"step: {point['rows']} rows, {point['slots']} slots, context {point['context']}",
            f"{point['median_ms']:.3f} ms, {point['ratio_to_one_row']:.2f} x one row, "
            f"{point['median_ms'] / point['floor_ms']:.1f} x floor ({point['floor_ms']:.3f} ms)",
        )
Console(width=110).print(table)
PYTHON
exit $failed
