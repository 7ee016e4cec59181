from hypothesis import given
from hypothesis import strategies as st

from quire.worker.eviction import EvictionQueue


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=400))
def test_the_lowest_score_is_popped_however_often_blocks_came_and_went(
    changes: list[tuple[int, int, bool]],
) -> None:
    queue, model = EvictionQueue(), dict[int, float]()
    for block_id, score, is_push in changes:
        queue.remove(block_id)
        model.pop(block_id, None)
        if is_push:
            queue.push(block_id, score)
            model[block_id] = score
        assert len(queue) == len(model)
    while model:
        lowest = min(model.values())
        assert model.pop(queue.pop()) == lowest
