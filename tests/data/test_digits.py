import numpy as np

from armature.data.digits import load_digits, split_indices


def test_splits_share_no_image_have_the_same_mix_and_never_change():
    digits = load_digits()[1]
    splits = split_indices(digits)
    assert sorted(np.concatenate(list(splits.values())).tolist()) == list(range(1797))
    assert {name: len(indices) for name, indices in splits.items()} == {
        "train": 1445,
        "val": 176,
        "test": 176,
    }
    assert splits["test"][:5].tolist() == [3, 7, 36, 38, 53]
    for indices in splits.values():
        share = np.bincount(digits[indices], minlength=10) / len(indices)
        assert (abs(share - np.bincount(digits) / 1797) < 0.01).all()
