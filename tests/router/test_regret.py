"""Sums that fade, against the sum written out."""

from math import exp
from random import Random

import pytest

from quire.router.policies.regret import Regrets


def test_a_sum_is_what_was_added_each_faded_by_its_age() -> None:
    rng, regrets = Random(1), Regrets()
    added: list[tuple[str, float, float]] = []
    at = 0.0
    for _ in range(300):
        at += rng.random() / 20
        key, regret = rng.choice("abc"), rng.random()
        added.append((key, regret, at))
        expected = sum(r * exp(then - at) for k, r, then in added if k == key)
        assert regrets.add(key, regret, at=at) == pytest.approx(expected)
        if rng.random() < 0.05:
            regrets.forget(key)
            added = [each for each in added if each[0] != key]


def test_what_was_added_to_longest_ago_is_forgotten_first() -> None:
    regrets = Regrets(max_keys=2)
    for key in ("a", "b", "a", "c"):
        regrets.add(key, 1.0, at=0.0)
    assert len(regrets) == 2
    assert regrets.add("a", 1.0, at=0.0) == 3.0
    assert regrets.add("b", 1.0, at=0.0) == 1.0
