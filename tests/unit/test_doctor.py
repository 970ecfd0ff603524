"""`milkweed doctor`: what is wrong is named with its mend, and its exit status says whether anything is."""

from __future__ import annotations

import json

import pytest

from milkweed import doctor


@pytest.fixture
def lock(tmp_path, monkeypatch):
    (tmp_path / "cpu.txt").write_text("# pins\nmsgspec==0.0.1\nNo_Such.Package==3.0\n")
    (tmp_path / "cpu-no-deps.txt").write_text("")
    monkeypatch.setattr(doctor, "lock_folder", lambda: tmp_path)


def test_a_package_that_differs_from_the_lock_or_is_absent_is_wrong_and_its_mend_is_the_pip_command(lock):
    summary, *wrong = doctor.versions("cpu")
    assert summary.value.startswith("0 of 2")
    assert [f.name for f in wrong] == ["msgspec", "no-such-package"]
    assert all(f.state == doctor.WRONG for f in wrong)
    assert wrong[0].mend == "pip install --no-deps msgspec==0.0.1"
    assert wrong[1].value.startswith("absent")


def test_this_environment_is_the_locked_one():
    lane = doctor.detect_lane()
    assert [f for f in doctor.versions(lane) if f.state == doctor.WRONG] == []
    assert [f for f in doctor.torch_build(lane) if f.state == doctor.WRONG] == []
    assert [f for f in doctor.sglang_cpu(lane) if f.state == doctor.WRONG] == []


def test_the_status_is_1_exactly_when_something_is_wrong(monkeypatch, capsys):
    def fine(lane):
        yield doctor.Finding("a", "1")

    def bad(lane):
        yield doctor.Finding("b", "2", doctor.WRONG, "turn it off and on")

    monkeypatch.setattr(doctor, "SLOW_CHECKS", [])
    monkeypatch.setattr(doctor, "CHECKS", [fine])
    assert doctor.main([]) == 0
    monkeypatch.setattr(doctor, "CHECKS", [fine, bad])
    assert doctor.main([]) == 1
    assert "-> turn it off and on" in capsys.readouterr().out
    assert doctor.main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["wrong"] == 1 and report["findings"][1]["mend"] == "turn it off and on"


def test_the_lane_can_be_chosen(monkeypatch):
    for lane in ("cpu", "gpu"):
        monkeypatch.setenv("MILKWEED_LANE", lane)
        assert doctor.detect_lane() == lane
