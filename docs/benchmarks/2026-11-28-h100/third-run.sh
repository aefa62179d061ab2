#!/bin/bash
# What serves: tests, the engine, prompts beside rows, the whole path, goldens. $1: folder for results; $2..: stages.
R=$1; shift; export OUT=$R PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv,noheader | tee $R/card.txt
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit
export PYTHONPATH=/tmp/site:$PWD
S=$(date +%s); t() { echo "== $1 at $(( $(date +%s)-S )) s"; }
tests() { timeout $1 python3 -m pytest -c /dev/null --rootdir . -p no:cacheprovider --import-mode=importlib --noconftest "${@:3}" -n 10 -q --tb=short -W ignore > $R/$2 2>&1; grep -E "passed|failed|^FAILED|^ERROR|^E  " $R/$2 | cut -c1-220 | tail -25; }
serve() { timeout $1 python3 -m tests.bench.gpu.serving "${@:2}" > $R/log.txt 2>&1 || tail -n 15 $R/log.txt | cut -c1-300; grep "^{" $R/log.txt | cut -c1-420; cat $R/log.txt >> $R/serving.log; }
for stage in "$@"; do
  case $stage in
    tests) tests 150 tests.txt tests/kernels/test_gpu.py tests/kernels/test_canvas.py tests/kernels/test_fp8.py tests/worker/test_graphs.py tests/worker/test_ahead.py ;;
    engine) serve 170 engine --plain ;;
    again) serve 100 engine prompts ;;
    fp8) serve 100 engine --weights fp8 ;;
    llada) serve 100 llada --model LLaDA-8B --rows 1,8 ;;
    lora) timeout 120 python3 -m tests.bench.lora > $R/lora.txt 2>&1; tail -n 25 $R/lora.txt | cut -c1-200 ;;
    block4) serve 100 engine --block 4 --steps 2 ;;
    prompts) serve 90 memory prompts ;;
    path) serve 170 path --rows 32,64 --rounds 3; tail -n 3 $R/worker.log | cut -c1-200 ;;
    others) serve 120 engine --model LLaDA2-mini ;;
    sweep) mkdir -p /tmp/warm; PIDS=; for i in 0 1 2 3 4 5 6 7 8 9 10 11; do OUT=/tmp/warm timeout 100 python3 -m tests.bench.gpu.kernels attention --warm --part $i --parts 12 >/tmp/warm/a$i 2>&1 & PIDS="$PIDS $!"; done; wait $PIDS
      timeout 90 python3 -m tests.bench.gpu.kernels attention > $R/kernels.log 2>&1; tail -n 2 $R/kernels.log | cut -c1-200 ;;
    agreement) for d in float32 bfloat16; do for a in off on; do DIFFLEET_DEVICE=cuda DIFFLEET_DTYPE=$d DIFFLEET_STEP_AHEAD=$a timeout 60 python3 -m tests.bench.gpu.agreement sdar llada llada2 2>&1 | tail -n 4; done; done ;;
    soak) serve 150 soak --seconds 90 ;;
    goldens) DIFFLEET_DEVICE=cuda tests 110 goldens.txt tests/goldens/test_goldens.py -k "sdar or llada"
      DIFFLEET_DEVICE=cuda DIFFLEET_STEP_AHEAD=on tests 80 goldens-ahead.txt tests/goldens/test_goldens.py -k "(sdar or llada2) and (alone or batch)" ;;
  esac
  t $stage
done
