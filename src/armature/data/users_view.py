"""What users see of a plain LightningDataModule: as `trainer.datamodule`, and as samplers of its
training loader.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as L
from torch import Tensor
from torch.utils.data import Dataset

from armature.data import namesakes
from armature.errors import NoEndOfData

namesakes.install()  # before any class of users is found
# Lightning reads these of `trainer.datamodule`, and must get the wrapper's
_OF_WRAPPER = frozenset(
    {
        "prepare_data",
        "setup",
        "teardown",
        "on_exception",
        "state_dict",
        "load_state_dict",
        "train_dataloader",
        "val_dataloader",
        "test_dataloader",
        "predict_dataloader",
        "_log_hyperparams",
    }
)

_SPECIAL = ("__len__", "__getitem__", "__iter__", "__contains__", "__call__")


def _of_users(name: str) -> Callable[..., Any]:
    def call(view: UsersView, *args: Any, **kwargs: Any) -> Any:
        return getattr(vars(view)["_wrapper"].module, name)(*args, **kwargs)

    return call


class UsersView:
    """Stands for the user's data module: its attributes go before those of the wrapper,
    `PlainData`, of the same name.

    Only what Lightning calls is the wrapper's. It is an instance of the user's class for
    `isinstance`.
    """

    def __new__(cls, wrapper: Any, kind: type | None = None) -> UsersView:
        """Return a view with the special methods of the user's class, which Python looks up in the
        class.
        """
        kind = kind or type(wrapper.module)
        own = {name: _of_users(name) for name in _SPECIAL if hasattr(kind, name)}
        view: type[Any] = type(cls.__name__, (cls,), own) if own else cls
        return super().__new__(view)

    def __init__(self, wrapper: Any, kind: type | None = None) -> None:
        vars(self)["_wrapper"] = wrapper

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        wrapper, own = vars(self)["_wrapper"], vars(self)
        if "_kind" not in own:
            # Lightning saves the position in the data under this name: the user may call the class
            # otherwise later
            own["_kind"] = type(type(wrapper).__qualname__, (type(wrapper.module),), {})
        return own["_kind"]

    def __getattr__(self, name: str) -> Any:
        wrapper = vars(self)["_wrapper"]
        if name not in _OF_WRAPPER:
            try:
                return getattr(wrapper.module, name)
            except AttributeError:
                if not hasattr(type(wrapper), name) and name not in vars(wrapper):
                    raise
        return getattr(wrapper, name)

    def __setattr__(self, name: str, value: Any) -> None:
        wrapper = vars(self)["_wrapper"]
        only_ours = hasattr(wrapper, name) and not hasattr(wrapper.module, name)
        setattr(wrapper if only_ours else wrapper.module, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        wrapper = vars(self)["_wrapper"]
        # a copy of the wrapper may not have its module yet
        return UsersView, (wrapper, type(wrapper.module))


def guard_steps(loop: Any) -> None:
    """Let a step of an evaluation that raises StopIteration end it with an error, not as if its
    data had ended.
    """
    name = "_predict_step" if hasattr(loop, "_predict_step") else "_evaluation_step"
    setattr(loop, name, partial(_guarded, getattr(loop, name)))  # a trainer can be pickled


def _guarded(
    step: Callable[..., None], batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any
) -> None:
    takes_iterator = dataloader_iter is not None  # whose end the step may meet
    with (
        nullcontext()
        if takes_iterator
        else NoEndOfData("A hook or step of evaluation or prediction")
    ):
        step(batch, batch_idx, dataloader_idx, dataloader_iter)


class UsersTrainer(L.Trainer):
    """Lightning's Trainer, whose `datamodule` is the user's data module, or its view.

    `run_data` is what runs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for loop in (self.validate_loop, self.test_loop, self.predict_loop):
            guard_steps(loop)

    @property
    def datamodule(self) -> Any:
        return self._users_data

    @datamodule.setter
    def datamodule(self, data: Any) -> None:
        self.run_data = data
        self._users_data = data if not hasattr(type(data), "users_view") else data.users_view()


class UsersSampler:
    """Stands for the user's sampler: hooks read and set its attributes, and reading its samples
    leaves it as it is.

    Each epoch's draw calls `set_epoch` itself. Lightning, which calls it on what it finds in the
    loader, would move the sampler by this rank's random state.
    """

    def __init__(self, sampler: Any) -> None:
        vars(self)["_sampler"] = sampler

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(vars(self)["_sampler"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["_sampler"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_sampler"], name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return UsersSampler, (vars(self)["_sampler"],)

    def __len__(self) -> int:
        return len(vars(self)["_sampler"])

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: Any) -> Any:
        return vars(self)["_sampler"][index]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_sampler"](*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        sampler = vars(self)["_sampler"]
        return iter(copied(sampler) or sampler)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing."""


def guarded(sampler: Any, *, changes: bool = False) -> Any:
    """Return a sampler as hooks see it: itself, unless it `changes` as it draws, or Lightning would
    set its epoch.
    """
    return UsersSampler(sampler) if changes or hasattr(sampler, "set_epoch") else sampler


def copied(sampler: Any) -> Any:
    """Return a copy of a sampler that shares datasets and tensors, or None if it cannot be
    copied.
    """
    try:
        shared = {
            id(value): value
            for value in vars(sampler).values()
            if isinstance(value, Dataset | Tensor)
        }
        return copy.deepcopy(sampler, shared)
    except Exception:
        return None
