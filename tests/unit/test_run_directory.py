"""The run directory: one controller, one configuration, and rows that a resume does not double."""

import json
import subprocess
import sys

import pytest

from milkweed.errors import ConfigError, RunLocked
from milkweed.observe.metrics import MetricsLog, flatten, read_metrics
from milkweed.runs.directory import RunDirectory, read_record, refuse_live


def open_run(path, **config):
    return RunDirectory(path, recipe="recipes/grpo.py", arguments=["--steps", "3"], config=config)


def test_a_second_controller_is_refused_while_the_first_lives(tmp_path):
    first = open_run(tmp_path / "run", lr=1.0)
    with pytest.raises(RunLocked, match=r"pid \d+"):
        open_run(tmp_path / "run", lr=1.0)
    with pytest.raises(RunLocked, match=r"is being run \(pid \d+"):
        refuse_live(tmp_path / "run")
    first.close()
    refuse_live(tmp_path / "run")
    open_run(tmp_path / "run", lr=1.0).close()


def test_the_lock_dies_with_its_process(tmp_path):
    code = (
        "import os, sys; from milkweed.runs.directory import RunDirectory\n"
        "RunDirectory(sys.argv[1], recipe='r', arguments=[], config={}); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], timeout=60).returncode == -9
    open_run(tmp_path / "run").close()


def test_another_configuration_is_refused_and_the_difference_named(tmp_path):
    open_run(tmp_path / "run", trainer={"lr": 1.0}, steps=5).close()
    with pytest.raises(ConfigError, match=r"trainer\.lr: 1\.0 -> 2\.0"):
        open_run(tmp_path / "run", trainer={"lr": 2.0}, steps=5)
    open_run(tmp_path / "run", trainer={"lr": 1.0}, steps=9).close()  # more steps is no other run


def test_a_run_that_never_began_does_not_keep_its_name(tmp_path):
    open_run(tmp_path / "run", lr=-1.0).discard()
    assert not (tmp_path / "run").exists()
    open_run(tmp_path / "run", lr=1.0).close()
    open_run(tmp_path / "run", lr=1.0).discard()  # one that was there before stays
    assert read_record(tmp_path / "run").config == {"lr": 1.0}


def test_a_directory_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not empty"):
        open_run(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_broken_record_is_named(tmp_path):
    open_run(tmp_path / "run").close()
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="run.json"):
        read_record(tmp_path / "run")


def test_metrics_after_the_checkpoint_are_dropped_on_resume(tmp_path):
    log = MetricsLog(tmp_path)
    for step in range(1, 6):
        log.log(step, {"reward": step / 10, "time": {"step": 1.0}})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')  # what a kill leaves
    log = MetricsLog(tmp_path, resumed_at=3)
    log.log(4, {"reward": 0.4})
    log.close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert read_metrics(tmp_path)[0]["time/step"] == 1.0


def test_rows_are_flat_and_json():
    assert flatten({"a": {"b": {"c": 1}}, "d": 2}) == {"a/b/c": 1, "d": 2}
    json.dumps(flatten({"a": {"b": 1}}))
