"""Two machines with their own addresses, joined by a cable: network namespaces on this machine."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tests import running

RUN = running.ROOT / "scripts" / "multinode" / "run.sh"


@dataclass
class Host:
    namespace: str
    interface: str
    address: str

    def start(self, *overrides: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, str(RUN), *overrides],
            env=running.environment(PYTHON=sys.executable, INTERFACE=self.interface, **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def received(self) -> int:
        """Return the number of bytes received through the cable."""
        file = f"/sys/class/net/{self.interface}/statistics/rx_bytes"
        return int(ip("netns", "exec", self.namespace, "cat", file))


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Create two hosts with private addresses, and delete them at the end."""
    names = [f"arm{os.getpid()}{end}" for end in "ab"]
    hosts = [Host(name, name, f"10.77.0.{i}") for i, name in enumerate(names, start=1)]
    made = []
    try:
        for host in hosts:
            ip("netns", "add", host.namespace)
            made.append(host.namespace)
        ends = [("name", host.interface, "netns", host.namespace) for host in hosts]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in hosts:
            ip(
                "-netns",
                host.namespace,
                "address",
                "add",
                f"{host.address}/24",
                "dev",
                host.interface,
            )
            ip("-netns", host.namespace, "link", "set", host.interface, "up")
            ip("-netns", host.namespace, "link", "set", "lo", "up")
        yield hosts
    finally:
        for name in made:
            ip("netns", "delete", name)
