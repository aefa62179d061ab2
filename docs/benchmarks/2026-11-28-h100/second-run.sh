#!/bin/bash
# Everything of one lease, each stage with its own limit. $1: folder for results.
R=$1; export OUT=$R PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv,noheader | tee $R/card.txt
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site *.whl
export PYTHONPATH=/tmp/site:.
python3 -c 'import torch,triton;print("torch",torch.__version__,"triton",triton.__version__)' | tee -a $R/card.txt
S=$(date +%s); t() { echo "== $1 at $(( $(date +%s)-S )) s"; }
mkdir -p /tmp/warm; PIDS=
for i in 0 1 2 3 4 5 6 7 8 9 10; do OUT=/tmp/warm timeout 100 python3 -m tests.bench.gpu.kernels attention --warm --part $i --parts 11 >/tmp/warm/a$i 2>&1 & PIDS="$PIDS $!"; done
OUT=/tmp/warm timeout 100 python3 -m tests.bench.gpu.kernels linear --warm >/tmp/warm/l 2>&1 & PIDS="$PIDS $!"
timeout 120 python3 -m pytest -c /dev/null --rootdir . -p no:cacheprovider --import-mode=importlib --noconftest tests/kernels/test_gpu.py tests/kernels/test_canvas.py tests/worker/test_graphs.py -n 10 -q --tb=short -W ignore > $R/tests.log 2>&1
grep -E "passed|failed|^FAILED|^ERROR" $R/tests.log | cut -c1-200 | tail -30
wait $PIDS; tail -qn 1 /tmp/warm/a* /tmp/warm/l | cut -c1-200; t warm
timeout 110 python3 -m tests.bench.gpu.kernels linear attention stats small moe > $R/kernels.log 2>&1; tail -n 2 $R/kernels.log; t kernels
timeout 90 python3 -m tests.bench.gpu SDAR-8B --label "as chosen" > $R/steps1.log 2>&1; grep -v "^{'bench': 'ceil" $R/steps1.log | cut -c1-330; t steps1
timeout 150 python3 -m tests.bench.gpu SDAR-8B LLaDA2-mini LLaDA-8B --tiles $R/kernels.jsonl --label "best measured" > $R/steps2.log 2>&1; grep -v "^{'bench': 'ceil" $R/steps2.log | cut -c1-330; t steps2
rm -f $R/warm.jsonl
