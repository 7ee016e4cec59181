from quire.cluster.errors import Death
from quire.cluster.links.deaths import Deaths


class Log(Deaths):
    """A log of deaths with a window of ten seconds and ``now_s`` as its clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        super().__init__(window_s=10, clock=lambda: self.now_s)


def test_there_is_calm_a_window_after_the_last_death() -> None:
    log = Log()
    assert log.unrest_s == 0
    log.add(Death("a", 1))
    log.now_s += 4
    log.add(Death("b", 2))
    assert log.unrest_s == 10
    log.now_s += 9
    assert log.unrest_s == 1
    log.now_s += 2
    assert log.unrest_s == 0


def test_a_death_of_which_is_heard_twice_is_one() -> None:
    log = Log()
    log.add(Death("a", 1))
    log.now_s += 4
    log.add(Death("a", 1))
    assert (len(log._deaths), log.unrest_s) == (1, 6)


def test_a_group_that_was_heard_of_again_has_not_died_but_can() -> None:
    log, cut_off = Log(), Death("a", 1)
    log.add(cut_off)
    cut_off.is_refuted = True
    assert log.unrest_s == 0
    assert not log.is_alone(cut_off)
    log.add(Death("a", 1))
    assert log.unrest_s == 10
    assert log.is_alone(Death("a", 1))


def test_a_death_within_a_window_of_another_is_not_alone() -> None:
    log = Log()
    first, second, third = (Death(name, 1) for name in "abc")
    log.add(first)
    log.now_s += 9
    log.add(second)
    log.now_s += 10
    log.add(third)
    assert [log.is_alone(death) for death in (first, second, third)] == [False, False, True]


def test_no_more_than_some_deaths_are_remembered() -> None:
    log = Log()
    for epoch in range(200):
        log.add(Death("a", epoch))
    assert len(log._deaths) == 64
