"""Benchmarks: each prints one table and a ratio. None of them is a test; figures in the docs name machine and command.

python -m tests.bench.path        the whole path (HTTP, Redis, worker) over the engine alone
python -m tests.bench.batching    32 concurrent requests over 32 one after another
python -m tests.bench.first       time from submit to the first event, over a bare denoise step
python -m tests.bench.streams     memory of an api process that holds 1,000 open streams
"""
