"""Find a hang from within the ranks, if no process of ours watches all of them: several machines,
torchrun, srun.

A thread of each rank counts the seconds since its last heartbeat. When they exceed the limit, it
asks all ranks what they are doing, through a store at MASTER_ADDR:MASTER_PORT. Every rank writes
its stacks to its log and answers. The rank that asked first writes the report, and all end.
"""

import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from armature.errors import RunFailed
from armature.launcher import environment, hang
from armature.launcher.watch import AUTO_SECONDS, AUTO_STEPS
from armature.training import blocked

POLL_SECONDS = 1.0
ASK_SECONDS = 4.0  # between two looks at the store: 1,000 ranks make 250 requests per second
ANSWER_SECONDS = 3 * ASK_SECONDS  # that all ranks have to answer
JUDGE_SECONDS = 2 * ANSWER_SECONDS  # after which a store that is asked counts as dead
# that rank 0, which may host the store, waits for the others to read the verdict
LAST_SECONDS = 3.0
ERRORS = (dist.DistError, RuntimeError, ValueError)


@dataclass
class Pulse:
    """What the watch knows of its own rank's progress."""

    beats: int = 0
    # seconds of the slowest step; infinite while no step is due (validation, a save)
    slowest: float = math.inf


def is_needed() -> bool:
    """Return whether no process of ours watches all ranks: those of one machine are, if we started
    them.
    """
    return environment.world_size() > 1 and environment.store_file() is None


class HangWatch:
    """Watch this rank from `start` to `stop`.

    Args:
        timeout: launch.hang_timeout: seconds, auto or None (never).
        attempt: the same word on all ranks, and another one whenever they begin anew.
        logs: the run directory's folder of logs.
        place: says where the run is.
        record: called with the error that ends this rank.
    """

    def __init__(
        self,
        pulse: Pulse,
        *,
        timeout: float | str | None,
        attempt: str,
        logs: Path,
        place: Callable[[], str],
        record: Callable[[BaseException], None],
    ) -> None:
        self.pulse, self.timeout, self.attempt = pulse, timeout, attempt
        self.logs, self.place, self.record = logs, place, record
        self.rank, self.ranks = environment.rank(), environment.world_size()
        self._over = threading.Event()
        self._judged = 0  # number of the last question that turned out to be about no hang
        self._store: Any = None

    def start(self) -> None:
        if self.timeout is None:
            return
        for work in (self._answer_questions, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    # ------------------------------------------------------------ this rank's own progress
    def limit(self, slowest: float) -> float:
        return (
            max(AUTO_SECONDS, AUTO_STEPS * slowest)
            if self.timeout == "auto"
            else float(self.timeout or math.inf)
        )

    def _watch(self) -> None:
        seconds, seen = 0.0, -1
        # counted, not read from a clock: a machine may be suspended
        while not self._over.wait(POLL_SECONDS):
            seconds, seen = (
                (0.0 if self.pulse.beats != seen else seconds + POLL_SECONDS),
                self.pulse.beats,
            )
            if seconds <= self.limit(self.pulse.slowest):
                continue
            if self._is_hang(seconds):
                self._end(
                    f"No step was made for {seconds:.0f} s, and no verdict about it came through "
                    "the store at "
                    f"{environment.main_address()}:{environment.main_port()}: the process or the "
                    "machine of rank 0 "
                    f"hangs, or the network is cut. Rank {self.rank} is at "
                    f"{blocked.record(place='')['stack'][0]}."
                )
            seconds = 0.0

    def _is_hang(self, seconds: float) -> bool:
        """Ask all ranks.

        Return False if one validates or saves; end in another thread if all hang.
        """
        before, beats = self._judged, self.pulse.beats
        # in a thread, since a call never returns if the store's process is stopped
        threading.Thread(target=self._ask, args=(seconds, beats), daemon=True).start()
        end = time.monotonic() + JUDGE_SECONDS
        while time.monotonic() < end and not self._over.wait(0.2):
            if self._judged > before or self.pulse.beats != beats:
                return False
        return not self._over.is_set()

    # ------------------------------------------------------------ through the store
    def _connect(self) -> Any:
        stores: Any = dist
        address, port, timeout = (
            environment.main_address(),
            environment.main_port(),
            timedelta(seconds=30),
        )
        store = stores.TCPStore(address, port, None, False, timeout, wait_for_workers=False)
        return stores.PrefixStore(f"armature-hang/{self.attempt}", store)

    def _read(self, key: str) -> dict[str, Any]:
        return json.loads(self._store.get(key)) if self._store.check([key]) else {"number": 0}

    def _answer_questions(self) -> None:
        try:
            self._store = self._connect()
        except ERRORS as error:
            print(
                f"launch.hang_timeout is off on rank {self.rank}: no store ({error}).",
                file=sys.stderr,
                flush=True,
            )
            self.stop()
        answered = 0
        while not self._over.wait(ASK_SECONDS):
            with suppress(*ERRORS):
                if (asked := self._store.add("asked", 0)) > answered:
                    answered = asked
                    self._answer(asked)
                    self._obey(asked)

    def _answer(self, number: int) -> None:
        with suppress(OSError), (self.logs / f"rank_{self.rank:04d}.log").open("a") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        slowest = None if math.isinf(self.pulse.slowest) else self.pulse.slowest
        answer = {
            "number": number,
            "slowest": slowest,
            "record": blocked.record(place=self.place()),
        }
        self._store.set(f"answer/{self.rank}", json.dumps(answer))

    def _obey(self, number: int) -> None:
        """Wait for the verdict about a question, and end if it is a hang."""
        end = time.monotonic() + JUDGE_SECONDS
        while time.monotonic() < end and not self._over.is_set():
            verdict = self._read("verdict")
            if verdict["number"] >= number:
                if verdict["text"]:
                    self._end(verdict["text"])
                self._judged = verdict["number"]
                return
            time.sleep(0.5)

    def _ask(self, seconds: float, beats: int) -> None:
        with suppress(*ERRORS):
            number, end = self._store.add("asked", 1), time.monotonic() + JUDGE_SECONDS
            while (judged := self._read("verdict")["number"]) + 1 != number:  # another rank asks
                if judged >= number or time.monotonic() > end or self._over.is_set():
                    return
                time.sleep(0.5)
            answers = self._collect(number)
            goes_on = self._over.is_set() or self.pulse.beats != beats
            # the others wait for a verdict in any case
            text = "" if goes_on else self._judge(answers, seconds)
            if text:
                print(text, file=sys.stderr, flush=True)
            self._store.set(
                "verdict", json.dumps({"number": self._store.add("asked", 0), "text": text})
            )

    def _collect(self, number: int) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + ANSWER_SECONDS
        while len(found) < self.ranks and time.monotonic() < end and not self._over.is_set():
            for rank in range(self.ranks):
                if (
                    rank not in found
                    and (answer := self._read(f"answer/{rank}"))["number"] >= number
                ):
                    found[rank] = answer
            time.sleep(0.2)
        return found

    def _judge(self, answers: dict[int, dict[str, Any]], seconds: float) -> str:
        """Write the report and return what ends the run; empty if it does not hang."""
        steps = [
            math.inf if answer["slowest"] is None else answer["slowest"]
            for answer in answers.values()
        ]
        if self.timeout == "auto" and seconds <= self.limit(max(steps, default=0.0)):
            return ""
        records = {rank: answer["record"] for rank, answer in answers.items()}
        with suppress(OSError):
            (self.logs / hang.REPORT).write_text(
                hang.report(records, ranks=range(self.ranks), seconds=seconds)
            )
        verdict = hang.verdict(records, ranks=range(self.ranks))
        verdict = f" {verdict[:1].upper()}{verdict[1:]}" if verdict else ""
        return (
            f"No step was made for {seconds:.0f} s.{verdict} {self.logs / hang.REPORT} says "
            "what each rank was doing."
        )

    def _end(self, text: str) -> None:
        if self._over.is_set():
            return
        try:  # torchrun shows the traceback
            raise RunFailed(
                f"{text} launch.hang_timeout limits a step, a validation batch and a save."
            )
        except RunFailed as error:
            self.record(error)
        time.sleep(LAST_SECONDS if self.rank == 0 else 0.0)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
