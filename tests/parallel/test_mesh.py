import pytest

from armature.parallel.mesh import AXES, resolve, shards_sequence


def sizes(**axes: int | str) -> dict[str, int | str]:
    return {**dict.fromkeys(AXES, 1), **axes}


def test_auto_takes_the_processes_that_are_left():
    assert resolve(sizes(shard="auto", tensor=2), world_size=8) == sizes(shard=4, tensor=2)


@pytest.mark.parametrize(
    ("axes", "world", "message"),
    [
        (sizes(shard=2, tensor=2), 8, "Type trainer.devices=4, or strategy.shard=auto."),
        (sizes(shard=2, tensor=3), 8, "does not make up the 8 processes. Type trainer.devices=6."),
        (sizes(shard="auto", tensor=3), 8, "Type trainer.devices=9"),
        (sizes(shard="auto", pipe="auto"), 8, "only one axis may be auto"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_a_remedy(axes, world, message):
    with pytest.raises(ValueError, match=message):
        resolve(axes, world_size=world)


@pytest.mark.parametrize("device", ["cuda", "gpu", "cpu"])
def test_positions_are_sharded_over_the_tensor_axis_except_on_cpus(device):
    assert shards_sequence("auto", device=device) == (device != "cpu")
    assert shards_sequence(True, device=device)
    assert not shards_sequence(False, device=device)
