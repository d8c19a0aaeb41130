"""CUDA tensors without memory, on a build of torch without CUDA.

`install()` comes before the first `import torch`.

    from armature.simulation import fake_cuda
    fake_cuda.install()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        torch.ones(2, device="cuda")

It replaces functions of torch for the whole process, so a process that trains must never call it.
The part in C++ (shim.cpp) is compiled once per version of torch, in about 15 s, to
`<cache>/simulation/`.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from armature.data import cache
from armature.errors import ConfigError

SOURCE = Path(__file__).with_name("shim.cpp")
COMPILERS = ("c++", "g++", "clang++")  # after $CXX
_shim: ctypes.CDLL | None = None  # as soon as it is loaded


def _nothing() -> None: ...


# called whenever code waits for the device by a function of torch.cuda
on_wait: Callable[[], None] = _nothing


@dataclass(frozen=True, kw_only=True)
class Device:
    """The GPU that is simulated: what `torch.cuda.get_device_properties` says of it."""

    name: str = "NVIDIA H100 80GB HBM3"
    memory_bytes: int = 80 * 2**30
    capability: tuple[int, int] = (9, 0)
    processors: int = 132
    count: int = 8  # on this machine


def install(device: Device | None = None) -> None:
    """Compile the shim unless it is in the cache, load it, import torch and replace the functions
    of torch.cuda.

    Raises:
        ConfigError: no compiler, or a build of torch with CUDA.
    """
    assert "torch" not in sys.modules, (
        "torch asks for CUDA's hooks once, when it is imported: install() comes first"
    )
    library = compiled()
    folder = _torch_folder() / "lib"
    for name in (
        "libgomp.so.1",
        "libc10.so",
        "libtorch_cpu.so",
        "libc10.dylib",
        "libtorch_cpu.dylib",
    ):
        if (folder / name).exists():
            ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
    global _shim
    _shim = ctypes.CDLL(str(library))
    _replace_functions(_shim)
    present(device or Device())


def compiled() -> Path:
    """Return the shim's library, compiled first if the cache has none for this torch.

    Several processes may compile at once: each renames its own result into place.
    """
    torch_folder = _torch_folder()
    version = (torch_folder / "version.py").read_text()
    if re.search(r"^cuda(: .*)? = ['\"]", version, re.MULTILINE):
        raise ConfigError(
            f"The simulator needs torch's CPU build, and {torch_folder} is built for CUDA. Type: "
            "python -m venv "
            ".venv-simulate && .venv-simulate/bin/pip install -r requirements.txt torch "
            "--extra-index-url "
            "https://download.pytorch.org/whl/cpu, and start the command with "
            ".venv-simulate/bin/python."
        )
    key = hashlib.sha256(
        SOURCE.read_bytes() + version.encode() + str(torch_folder).encode()
    ).hexdigest()[:16]
    suffix = sysconfig.get_config_var("SHLIB_SUFFIX") or ".so"
    library = cache.root(None) / "simulation" / f"shim-{key}{suffix}"
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        # beside the target: a rename stays on its disk
        with tempfile.TemporaryDirectory(dir=library.parent) as part:
            built = Path(part) / library.name
            _compile(built, torch_folder)
            os.replace(built, library)
    except OSError as error:
        raise ConfigError(
            f"{library.parent} cannot be written ({error.strerror or error}). Set ARMATURE_CACHE "
            "in the environment to "
            "a folder that can."
        ) from error
    return library


def _compile(library: Path, torch_folder: Path) -> None:
    chosen = os.environ.get("CXX")
    compiler = next(
        (path for name in ([chosen] if chosen else COMPILERS) if (path := shutil.which(name))), None
    )
    if compiler is None:
        found = (
            f"CXX={chosen} is not there" if chosen else f"none of {', '.join(COMPILERS)} is there"
        )
        raise ConfigError(
            f"The simulator needs a C++ compiler with C++20, and {found}. Type apt-get install g++ "
            "(or dnf install "
            "gcc-c++, or module load gcc), or set CXX. Training needs none."
        )
    command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    command += [
        f"-I{torch_folder / 'include'}",
        f"-L{torch_folder / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        last = (
            "\n".join(line for line in result.stderr.splitlines() if "error" in line)
            or result.stderr
        )
        raise ConfigError(
            f"{compiler} cannot compile {SOURCE} (C++20 and torch's headers are needed: g++ 10 or "
            "later). Set CXX to "
            f"another compiler. It reports:\n{last[-2000:]}"
        )


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


# ---------------------------------------------------------------- torch.cuda
class Stream:
    """A stream on which nothing runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import torch

        self.device, self.cuda_stream, self.stream_id = (
            torch.device("cuda", torch.cuda.current_device()),
            0,
            0,
        )

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = _nothing

    def synchronize(self) -> None:
        on_wait()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...


class Event:
    """An event of a stream on which nothing runs: it has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> Event:
        return self

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        on_wait()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


def present(device: Device) -> None:
    """Let torch.cuda describe this device from now on."""
    import torch

    stream = Stream()
    properties = SimpleNamespace(
        name=device.name,
        major=device.capability[0],
        minor=device.capability[1],
        total_memory=device.memory_bytes,
        multi_processor_count=device.processors,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 * 2**20,
        gcnArchName="",
        uuid="0",
    )
    constants: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": device.count,
        "init": None,
        "_lazy_init": None,
        "_lazy_call": None,
        "empty_cache": None,
        "set_stream": None,
        "reset_peak_memory_stats": None,
        "ipc_collect": None,
        "is_bf16_supported": device.capability >= (8, 0),
        "get_device_name": device.name,
        "get_device_capability": device.capability,
        "get_device_properties": properties,
        "can_device_access_peer": True,
        "get_arch_list": [],
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "memory_stats": {},
        "mem_get_info": (device.memory_bytes, device.memory_bytes),
        "current_stream": stream,
        "default_stream": stream,
        "is_current_stream_capturing": False,
        "manual_seed": None,
        "manual_seed_all": None,
        "set_rng_state": None,
    }
    for name, value in constants.items():
        setattr(torch.cuda, name, _returning(value))
    accelerator = {"device_count": device.count, "current_stream": stream, "is_available": True}
    for name, value in accelerator.items():
        setattr(torch.accelerator, name, _returning(value))
    torch.cuda.synchronize = torch.accelerator.synchronize = lambda device=None: on_wait()
    if _shim is not None:
        _shim.armature_set_capability(*device.capability)


def _replace_functions(shim: ctypes.CDLL) -> None:
    import torch

    # while torch.cuda still says that it is not compiled: it imports CUDA's C functions
    import torch._inductor.utils
    from torch._subclasses import fake_tensor

    def index_of(chosen: Any) -> int:
        index = chosen if isinstance(chosen, int) else torch.device(chosen).index
        return shim.armature_current_device() if index is None else index

    torch.cuda.current_device = shim.armature_current_device
    torch.cuda.set_device = lambda device: shim.armature_set_device(index_of(device))
    torch.cuda.stream = lambda stream=None: Stream()  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.Stream, torch.cuda.Event = Stream, Event  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.get_rng_state = lambda device="cuda": torch.zeros(16, dtype=torch.uint8)
    torch.version.cuda = "12.8"  # pyright: ignore[reportAttributeAccessIssue]
    # in inference mode torch.tensor(…, device="cuda") reaches the fake mode as aten.to, whose
    # constant it would compute
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else torch.enable_grad()  # pyright: ignore
    # a fake mode remembers its tensors by weak references, which swap_tensors (nn.Module._apply)
    # would refuse
    torch.utils.weakref = SimpleNamespace(getweakrefs=lambda tensor: [])  # pyright: ignore
    # else torch.tensor(…, device="cuda") would ask a device for memory
    torch._C._set_only_lift_cpu_tensors(True)
    torch._C._set_only_lift_cpu_tensors = lambda value: None  # pyright: ignore[reportAttributeAccessIssue]
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)  # pyright: ignore
    fake_tensor.init_gpu_context = lambda device: None
    fake_tensor.FakeTensor.__deepcopy__ = lambda self, memo: self.detach().clone()  # pyright: ignore


def _returning(value: Any) -> Any:
    return lambda *args, **kwargs: value
