"""What a worker says of a step that servers have already done changes nothing."""

from spmdctx.server.state.progress import Go, Progress


def test_a_part_that_is_reported_after_its_step_is_done_holds_no_part_of_the_next():
    progress = Progress(1)
    progress.start(0, 1, 2)
    progress.hello(0), progress.hello(1)
    assert [progress.ask(worker, 0).parts for worker in (0, 1)] == [(0,), (1,)]
    progress.pushed(progress.generation, 0, [0])
    assert progress.applied(0, progress.generation, 1, {})
    assert progress.ask(0, 1).parts == (0,)
    progress.pushed(progress.generation, 0, [1])
    progress.pushed(progress.generation, 1, [0])
    assert progress.ask(1, 1) == Go(progress.generation, 1, (1,))
