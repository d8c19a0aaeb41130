"""The report about a hang says where each rank was and in which collective it waited."""

import json
import sys

import pytest

from armature.launcher import hang
from armature.launcher.hang import Progress
from tests import forked, running

DUMP = """Timeout (0:05:00)!
Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3/threading.py", line 9 in run

Thread 0x00007f0000000000 (most recent call first):
  File "{library}/torch/distributed/c10d.py", line 12 in all_reduce
  File "/home/me/task.py", line 7 in training_step
  File "/home/me/train.py", line 3 in <module>
"""
WORKER = f"""Thread 0x1 (most recent call first):
  File "{json.__file__}", line 3 in select
  File "{{library}}/torch/utils/data/dataloader.py", line 9 in _try_get_data
"""


def test_the_report_has_the_users_line_and_the_collective_of_each_rank(tmp_path):
    library = next(path for path in sys.path if path.endswith("site-packages"))
    older = 'Thread 0x1 (most recent call first):\n  File "/home/me/old.py", line 1 in old\n'
    (tmp_path / "rank_0000.log").write_text(older + DUMP.format(library=library))
    (tmp_path / "rank_0001.log").write_text(older)
    (tmp_path / "rank_0002.log").write_text(older + WORKER.format(library=library))
    (tmp_path / hang.FLIGHT.format(rank=0)).write_text(json.dumps(["all_reduce of [[4096]]"]))
    step = Progress(place="train after step 7", seconds=5.0, deadline=0.0, log_size=len(older))
    ranks = dict.fromkeys(range(3), step)
    lines, text = hang.report(tmp_path, tmp_path, ranks=ranks)
    assert lines[0].startswith("rank 0: train after step 7, at /home/me/task.py:7 training_step")
    assert "all_reduce of [[4096]]" in lines[0]
    assert "old.py" not in text
    assert "c10d.py:12 all_reduce" in text
    assert "no stack" in lines[1]
    assert "dataloader.py:9 _try_get_data" in lines[2]


@pytest.mark.slow
def test_ranks_that_another_launcher_started_end_themselves(corpus):
    ended = forked.shared().train(
        *running.TINY,
        f"data.path={corpus}",
        "strategy=ddp",
        "trainer.devices=2",
        "run.name=hanging",
        "launch.hang_timeout=2",
        "launch.allowed_packages=[armature,torch.optim,lightning.pytorch,tests]",
        "+callbacks.hangs={_target_:tests.launcher.hanging.Sleeps,step:2}",
        ranks=2,
        expect=1,
        seconds=60,
    )
    assert ended.codes == [1, 1]
    log = forked.shared().cwd / "outputs" / "hanging" / "logs" / "rank_0001.log"
    assert "Timeout (0:00:02)!" in log.read_text()
    assert "hanging.py" in log.read_text()
