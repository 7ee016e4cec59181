"""Numbers of Hypothesis examples for tests that need more or fewer than the profile's."""

from hypothesis import settings


def examples(number: int) -> int:
    """Scales ``number`` by the profile's ``max_examples`` over 100, Hypothesis's default."""
    return number * settings().max_examples // 100
