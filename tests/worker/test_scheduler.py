"""Who runs where not all can."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.commands import Generate
from tests.worker.test_engine import Bench, ask
from worker.engine.ports import Arrival, Inbox

STEPS = 40
newcomers = st.builds(ask, st.lists(st.integers(0, 59), min_size=1, max_size=30), st.integers(1, 9))
some_by_step = st.dictionaries(st.integers(0, STEPS - 1), st.lists(newcomers, max_size=3), max_size=8)


@given(st.integers(2, 6), st.integers(16, 40), some_by_step, st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_no_row_waits_longer_than_for_each_other_one_whoever_comes(
    rows: int, budget: int, some: dict[int, list[Generate]], flood: int
) -> None:
    """`flood` answers of one step come in each step."""
    bench = Bench(pages=400, rows=rows, budget=budget)
    bench.step(Inbox(arrivals=[Arrival(ask(range(9), 120, ignore_eos=True), 1)]))
    planned: dict[str, int] = {}

    for number in range(STEPS):
        coming = [*some.get(number, ()), *(ask([5, 6, 7], 1) for _ in range(flood))]
        bench.step(Inbox(arrivals=[Arrival(request, 1) for request in coming]))
        plan = bench.forward.plans[-1]
        for request_id in plan.running:
            planned.setdefault(request_id, number - 1)
        planned |= {row.request_id: number for row in plan.rows}
        assert all(number - planned[request_id] <= rows for request_id in plan.running)
