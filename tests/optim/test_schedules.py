import pytest
import torch

from armature.optim import schedules


def rates(name: str, steps: int = 100, **options) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = getattr(schedules, name)(optimizer, steps, **options)
    found = []
    for _ in range(steps + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_rises_to_the_peak_from_above_zero(name):
    lr = rates(name, warmup=10)
    assert 0 < lr[0] < lr[5] < lr[10] == 2.0


@pytest.mark.parametrize(("steps", "share"), [(10, 0.1), (0, 0.0)])
def test_a_share_of_the_run_means_so_many_steps(steps, share):
    assert rates("cosine", warmup=steps) == rates("cosine", warmup=share)


def test_shapes():
    assert rates("cosine", warmup=0, final=0.1)[50] == pytest.approx(2.0 * 0.55)
    assert rates("linear", warmup=0, final=0.0)[25] == pytest.approx(1.5)
    wsd = rates("wsd", warmup=0, decay=20, final=0.1)
    assert wsd[:81] == [2.0] * 81
    assert wsd[90] == pytest.approx(2.0 * 0.55)
    assert rates("constant", warmup=0) == [2.0] * 101


def test_state_is_the_step_and_resumes_under_other_groups_and_rates():
    def make(lr: float, groups: int):
        params = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(groups)]
        optimizer = torch.optim.SGD(params, lr=lr)
        return optimizer, schedules.cosine(optimizer, 100)

    optimizer, schedule = make(1.0, groups=3)
    for _ in range(40):
        optimizer.step()
        schedule.step()
    resumed_optimizer, resumed = make(2.0, groups=2)
    resumed.load_state_dict(schedule.state_dict())
    assert set(schedule.state_dict()) == {"last_epoch", "_step_count"}
    assert [group["lr"] for group in resumed_optimizer.param_groups] == [
        2 * optimizer.param_groups[0]["lr"]
    ] * 2


def test_a_group_that_is_added_later_keeps_its_share_of_the_rate():
    def make():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return optimizer, schedules.linear(optimizer, 10, warmup=0)

    def steps(optimizer, schedule, count):
        for _ in range(count):
            optimizer.step()
            schedule.step()
        return [group["lr"] for group in optimizer.param_groups]

    optimizer, schedule = make()
    assert steps(optimizer, schedule, 5) == pytest.approx([0.5])
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.05})
    assert steps(optimizer, schedule, 1) == pytest.approx([0.4, 0.04])
    resumed_optimizer, resumed = make()
    added = {key: value for key, value in optimizer.param_groups[1].items() if key != "params"}
    resumed_optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], **added})
    resumed.load_state_dict(schedule.state_dict())
    assert [group["lr"] for group in resumed_optimizer.param_groups] == pytest.approx([0.4, 0.04])
    assert (
        steps(resumed_optimizer, resumed, 2)
        == steps(optimizer, schedule, 2)
        == pytest.approx([0.2, 0.02])
    )


def test_warm_up_and_decay_longer_than_the_run_are_named_and_cut_short(caplog):
    assert rates("wsd", warmup=60, decay=0.5)[80] == 1.0
    assert "warmup=60 and scheduler.decay=0.5: longer than the run's 100 steps" in caplog.text
