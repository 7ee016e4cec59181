from quire.cluster.links.liveness import Liveness


def pulse() -> Liveness:
    return Liveness(silence_timeout_s=2.0, step_deadline_s=1.0)


def test_a_group_that_says_nothing_for_the_whole_timeout_is_lost() -> None:
    silent = pulse()
    endings = [silent.beat(is_owed=False) for _ in range(round(2.0 / silent.beat_s))]
    assert endings[:-1] == [None] * (len(endings) - 1)
    assert endings[-1] is not None
    assert endings[-1].reason == "no frame for 2 s"
    assert endings[-1].is_death
    assert endings[-1].is_refutable


def test_one_frame_begins_the_silence_anew() -> None:
    silent = pulse()
    for beat in range(40):
        if beat % 8 == 6:
            silent.frame(step=0)
        assert silent.beat(is_owed=False) is None


def test_a_group_that_owes_tokens_must_step_whatever_it_says() -> None:
    hung = pulse()
    hung.frame(step=7)
    assert hung.beat(is_owed=True) is None
    endings = []
    for _ in range(round(1.0 / hung.beat_s)):
        hung.frame(step=7)
        endings.append(hung.beat(is_owed=True))
    assert endings[:-1] == [None] * (len(endings) - 1)
    assert endings[-1] is not None
    assert endings[-1].reason == "no step for 1 s, with work to do"
    assert not endings[-1].is_refutable, "it can be attached again and hangs still"


def test_a_group_that_owes_nothing_need_not_step() -> None:
    idle = pulse()
    for beat in range(100):
        idle.frame(step=7)
        # It is late now and then, by less than the deadline.
        assert idle.beat(is_owed=beat % 4 != 0) is None


def test_a_group_that_steps_is_well_however_much_it_owes() -> None:
    busy = pulse()
    for step in range(1, 100):
        busy.frame(step=step // 3)
        assert busy.beat(is_owed=True) is None
