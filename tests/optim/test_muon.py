import pytest
import torch

from armature.optim.muon import Muon, orthogonalize


@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (64, 16)])
def test_orthogonalize_pushes_singular_values_towards_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrix).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_other_groups_follow_adamw():
    torch.manual_seed(0)
    ours, theirs = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4, 4))
    options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    pairs = [
        (ours, Muon([{"params": [ours], "hidden": False}], **options)),
        (theirs, torch.optim.AdamW([theirs], **options)),
    ]
    for _ in range(5):
        gradient = torch.randn(4, 4)
        for param, optimizer in pairs:
            param.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_a_step_of_a_stack_is_that_of_its_matrices():
    def stepped(params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> torch.Tensor:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        Muon([{"params": params, "hidden": True}], lr=1.0).step()
        return torch.stack([param.detach() for param in params])

    grad = torch.randn(5, 8, 16, generator=torch.Generator().manual_seed(0))
    together = stepped([torch.nn.Parameter(torch.ones(5, 8, 16))], [grad])[0]
    alone = stepped([torch.nn.Parameter(torch.ones(8, 16)) for _ in grad], [*grad])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
