#!/bin/bash
# Slots and room: tests, then each way to commit in the same run. $1: folder for results; $2..: stages.
R=$1; shift; export OUT=$R PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv,noheader | tee $R/card.txt
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit
export PYTHONPATH=/tmp/site:$PWD
S=$(date +%s); t() { echo "== $1 at $(( $(date +%s)-S )) s"; }
tests() { timeout $1 python3 -m pytest -c /dev/null --rootdir . -p no:cacheprovider --import-mode=importlib --noconftest "${@:3}" -n 10 -q --tb=short -W ignore > $R/$2 2>&1; grep -E "passed|failed|^FAILED|^ERROR|^E  " $R/$2 | cut -c1-220 | tail -25; }
serve() { timeout $1 python3 -m tests.bench.gpu.serving "${@:2}" > $R/log.txt 2>&1 || tail -n 15 $R/log.txt | cut -c1-300; grep "^{" $R/log.txt | cut -c1-700; cat $R/log.txt >> $R/serving.log; }
for stage in "$@"; do
  case $stage in
    tests) tests 100 tests.txt tests/kernels/test_canvas.py tests/worker/test_graphs.py tests/worker/test_ahead.py tests/kernels/test_token_stats.py tests/kernels/test_gpu.py ;;
    quick) tests 40 tests.txt tests/kernels/test_canvas.py tests/worker/test_graphs.py tests/worker/test_bank.py ;;
    b32) serve 90 engine --commit "chosen,own pass" ;;
    b4) serve 70 engine --block 4 --steps 2 --commit "chosen,a slot for each" ;;
    b4chosen) serve 50 engine --block 4 --steps 2 ;;
    b8) serve 40 engine --rows 8 --commit "chosen,own pass,chosen" ;;
    mini64) serve 50 engine --model LLaDA2-mini --rows 64 ;;
    mini) serve 80 engine --model LLaDA2-mini --commit "chosen,own pass" ;;
    llada) serve 60 llada --model LLaDA-8B --rows 8 ;;
  esac
  t $stage
done
