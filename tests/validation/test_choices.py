"""Values that must be one of a few."""

from armature.validation import values


def test_true_is_a_choice_where_it_is_named_and_no_number():
    assert (
        list(values._choices({"strategy": {"sequence_parallel": True}}, values.OWN_CHOICES)) == []
    )
    assert (
        list(values._choices({"strategy": {"sequence_parallel": False}}, values.OWN_CHOICES)) == []
    )
    (problem,) = values._choices({"strategy": {"stage": True}}, values.OWN_CHOICES)
    assert problem.startswith("strategy.stage=True: must be one of 1, 2, 3.")
