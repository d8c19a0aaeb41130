"""The order check: what it says of small records, and that the ranks of real layouts meet."""

from armature.planning.simulation import order
from armature.planning.simulation.order import Issued, Operation

BOTH = (0, 1)


def record(*operations: Operation | list[Operation]) -> order.Record:
    issued = [each if isinstance(each, list) else [each] for each in operations]
    return [Issued(each, f"model.py:{line} in step") for line, each in enumerate(issued)]


def send(to: int, size: int = 8) -> Operation:
    return Operation("send", BOTH, to, size)


def receive(source: int, size: int = 8) -> Operation:
    return Operation("recv", BOTH, source, size)


def reduce(*group: int, size: int = 4) -> Operation:
    return Operation("allreduce", group or BOTH, bytes=size)


def test_equal_orders_meet():
    assert (
        order.problems(
            [record(reduce(), send(1), reduce()), record(reduce(), receive(0), reduce())]
        )
        == []
    )


def test_a_rank_that_has_ended_is_named():
    (problem,) = order.problems([record(reduce(), reduce()), record(reduce())])
    assert (
        "rank 0 at model.py:1 in step: allreduce of 4 bytes among ranks 0, 1, which rank 1"
        in problem
    )
    assert "rank 1 has ended" in problem


def test_two_ranks_that_both_send_first_meet_if_they_batch():
    assert order.problems([record([send(1), receive(1)]), record([send(0), receive(0)])]) == []


def test_another_size_does_not_meet():
    assert order.problems([record(send(1, 8)), record(receive(0, 4))])


def test_groups_in_another_order_on_another_rank_do_not_meet():
    first, second = reduce(0, 1), reduce(0, 1, 2)
    assert order.problems([record(first, second), record(second, first), record(second)])
    assert order.problems([record(first, second), record(first, second), record(second)]) == []


def test_an_all_to_all_meets_if_each_rank_receives_what_the_others_send():
    def exchange(sent: list[int], received: list[int]) -> Operation:
        return Operation("alltoall_base", BOTH, splits=(*sent, *received))

    assert (
        order.problems([record(exchange([1, 2], [1, 3])), record(exchange([3, 4], [2, 4]))]) == []
    )
    assert order.problems([record(exchange([1, 2], [1, 3])), record(exchange([3, 4], [5, 4]))])
