"""Timings of several systems that take turns."""

from __future__ import annotations

import time

from tests.benchmarks.test_benchmarks import taken


def test_systems_take_turns_in_an_order_that_favours_none() -> None:
    orders, found = taken(40)
    assert all(sorted(order) == list("abc") for order in orders)
    assert orders[1::2] == [order[::-1] for order in orders[::2]]
    assert len(set(orders)) == 6  # of three systems there are six orders, and each comes
    assert [found[name][7] for name in "abc"] == [22 + orders[7].index(name) for name in "abc"]
    assert (taken(40)[0], taken(40, seed=1)[0] == orders) == (orders, False)


def test_rounds_stop_when_their_time_is_spent_but_not_at_once() -> None:
    assert len(taken(40, until=0.0)[0]) == 3
    assert len(taken(40, until=0.0, least=7)[0]) == 7
    assert len(taken(2, until=0.0)[0]) == 2
    assert len(taken(5, until=time.monotonic() + 60)[0]) == 5
