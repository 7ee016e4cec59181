from quire.cluster.errors import Death
from quire.cluster.links.deaths import Deaths


class Log(Deaths):
    """With a window of ten seconds, at ``now_s``."""

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
    assert (log.num, log.unrest_s) == (1, 6)


def test_a_group_that_was_heard_of_again_has_not_died_but_can() -> None:
    log, cut_off = Log(), Death("a", 1)
    log.add(cut_off)
    cut_off.is_refuted = True
    assert log.unrest_s == 0
    assert not log.any_since(0, besides=set())
    log.add(Death("a", 1))
    assert log.unrest_s == 10
    assert log.any_since(1, besides=set())


def test_only_later_deaths_of_other_groups_are_asked_for() -> None:
    log = Log()
    log.add(Death("a", 1))
    num = log.num
    log.add(Death("b", 2))
    assert log.any_since(0, besides={("b", 2)})
    assert log.any_since(num, besides={("a", 1)})
    assert not log.any_since(num, besides={("b", 2)})


def test_no_more_than_some_deaths_are_remembered() -> None:
    log = Log()
    for epoch in range(200):
        log.add(Death("a", epoch))
    assert len(log._deaths) == 64
    assert log.num == 200
