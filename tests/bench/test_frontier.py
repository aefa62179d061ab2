"""Benchmarks' shares of a step: what overlaps is counted once."""

from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from tests.bench.gpu.frontier import IDLE, Span, share_out

spans = st.lists(
    st.builds(
        lambda name, start, length: Span(name, float(start), float(start + length)),
        st.sampled_from("abc"), st.integers(0, 50), st.integers(0, 9),
    ),
    min_size=1,
)  # fmt: skip


def test_a_kernel_that_waits_for_the_one_before_is_given_only_its_own_end():
    shares = share_out([Span("norm", 0, 4), Span("product", 1, 10), Span("norm", 12, 13)])
    assert {name: (share.us, share.launches) for name, share in shares.items()} == {
        "product after norm": (6, 1),
        "norm": (5, 2),
        IDLE: (2, 0),
    }


@given(spans)
def test_shares_add_up_to_what_kernels_and_gaps_take(spans: list[Span]):
    shares = share_out(spans)
    first_to_end = min(spans, key=lambda span: (span.end, span.start))
    passed = max(span.end for span in spans) - first_to_end.start
    assert sum(share.us for share in shares.values()) == approx(passed)
    assert all(share.us >= 0 for share in shares.values())
