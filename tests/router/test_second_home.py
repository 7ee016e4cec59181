"""Sums that fade and are never negative, against the sum written out."""

from math import exp
from random import Random

import pytest

from quire.router.policies.second_home import Regrets


def test_a_sum_is_what_was_added_faded_step_by_step_and_never_negative() -> None:
    rng, regrets = Random(1), Regrets()
    sums, at, num_empty = dict.fromkeys("abc", 0.0), 0.0, 0
    for _ in range(300):
        later = rng.random() / 20
        at += later
        sums = {key: total * exp(-later) for key, total in sums.items()}
        key, regret = rng.choice("abc"), rng.uniform(-0.8, 1.0)
        sums[key] = max(sums[key] + regret, 0.0)
        num_empty += not sums[key]
        assert regrets.add(key, regret, at=at) == pytest.approx(sums[key], abs=1e-12)
        if rng.random() < 0.05:
            regrets.forget(key)
            sums[key] = 0.0
    assert num_empty > 10


def test_what_was_added_to_longest_ago_is_forgotten_first() -> None:
    regrets = Regrets(max_keys=2)
    for key in ("a", "b", "a", "c"):
        regrets.add(key, 1.0, at=0.0)
    assert len(regrets) == 2
    assert regrets.add("a", 1.0, at=0.0) == 3.0
    assert regrets.add("b", 1.0, at=0.0) == 1.0
