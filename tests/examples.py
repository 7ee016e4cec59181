"""How many examples Hypothesis tries where a test wants more or fewer of them than most do."""

from hypothesis import settings


def examples(number: int) -> int:
    """``number`` with 100 in the profile, as by default, and in proportion with another one."""
    return number * settings().max_examples // 100
