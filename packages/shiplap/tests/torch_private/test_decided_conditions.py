"""Conditions on data are decided for the thread that traces, and for no other."""

from concurrent.futures import ThreadPoolExecutor

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from shiplap.torch_private.symbolic_sizes import DecideConditions, unknown_size_error


def test_other_threads_get_the_answers_of_torch() -> None:
    size = ShapeEnv().create_unbacked_symint()
    with DecideConditions((True,), 8, 1) as conditions:
        with ThreadPoolExecutor(1) as pool:
            failure = pool.submit(bool, size == 3).exception()
        assert isinstance(failure, unknown_size_error())
        assert conditions.asked == []
        assert bool(size == 3)
        assert len(conditions.asked) == 1
