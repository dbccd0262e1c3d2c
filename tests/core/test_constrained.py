"""Rows that a grammar constrains wait for their last token; the others do not wait for them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.driver import Driver, Reckless, make_limits, make_request
from tridentlm.core.extras import RequestExtras
from tridentlm.core.plan import StepPlan
from tridentlm.core.radix import RadixCache

CONSTRAINED = RequestExtras(grammar="some")


def constrained_ids(plan: StepPlan) -> list[int]:
    if plan.extras is None:
        return []
    return sorted(plan.extras.request_ids[plan.extras.constrained].tolist())


def test_a_constrained_row_skips_the_step_whose_token_it_needs() -> None:
    driver = Driver(make_limits())
    driver.add(make_request(1, max_tokens=8), make_request(2, max_tokens=8, extras=CONSTRAINED))
    rows = []
    for _ in range(4):
        plan = driver.launch()
        assert plan is not None
        rows.append((plan.num_rows, constrained_ids(plan)))
        if len(driver.launched) == 2:
            driver.collect()
    assert rows == [(2, [2]), (1, []), (2, [2]), (1, [])]


def test_with_one_step_in_flight_it_goes_on_every_step() -> None:
    driver = Driver(make_limits())
    driver.add(make_request(2, max_tokens=4, extras=CONSTRAINED))
    for _ in range(4):
        plan = driver.launch()
        assert plan is not None
        assert constrained_ids(plan) == [2]
        driver.collect()
    driver.run()


def test_chunks_of_its_prompt_do_not_wait() -> None:
    driver = Driver(make_limits(max_step_tokens=4))
    driver.add(make_request(2, prompt_len=12, extras=CONSTRAINED))
    plans = [driver.launch() for _ in range(3)]
    assert [len(plan.sampled) for plan in plans if plan] == [0, 0, 1]
    assert [constrained_ids(plan) for plan in plans if plan] == [[], [], [2]]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.booleans()), max_size=12),
    st.integers(12, 40),
    st.integers(1, 2),
)
def test_no_schedule_launches_a_constrained_row_blindly(
    requests: list[tuple[int, int, bool]], num_pages: int, steps_in_flight: int
) -> None:
    """Few pages, so that many are preempted; `Driver.run` compares all tokens with those alone."""
    limits = make_limits(num_pages=num_pages, max_step_tokens=16)
    driver = Driver(limits, cache=RadixCache(4), expected=Reckless())
    for i, (prompt_len, max_tokens, constrained) in enumerate(requests):
        extras = CONSTRAINED if constrained else None
        fits = min(max_tokens, num_pages * 4 - prompt_len)
        driver.add(make_request(i, prompt_len, fits, extras=extras))
    driver.run(steps_in_flight)
