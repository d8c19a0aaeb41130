"""Whether sketches of samples tell another sample from the same one."""

from armature.data.alike import near, sketch


def test_a_sketch_of_long_nested_lists_is_short():
    lists = [[[float(i * j + first) for j in range(3000)] for i in range(8)] for first in (0, 10**6)]
    one, two = map(sketch, lists)
    assert len(one) < 2100
    assert near(one, sketch(lists[0]))
    assert not near(one, two)
    assert not near(one, sketch(lists[0][:-1]))
