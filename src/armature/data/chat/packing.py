"""Put whole conversations into rows of a fixed length. Torch-free."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], *, room: int) -> list[list[int]]:
    """Return rows of indices whose lengths sum to at most `room`: longest first, each into the
    fullest row it fits.

    Best-fit decreasing needs at most 11/9 of the fewest possible rows, and one (Johnson et al.,
    1974, doi:10.1137/0203025). Rows, and indices within them, are in the order of the indices. No
    length is above `room`.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = defaultdict(list)  # rows with this much room left
    rooms: list[int] = []  # the keys of by_room, sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(rooms, lengths[index])
        if place == len(rooms):
            row, left = len(rows), room
            rows.append([])
        else:
            left = rooms[place]
            row = by_room[left].pop()
            if not by_room[left]:
                del rooms[place], by_room[left]
        rows[row].append(index)
        left -= lengths[index]
        if left not in by_room:
            insort(rooms, left)
        by_room[left].append(row)
    return sorted(map(sorted, rows))
