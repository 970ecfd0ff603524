"""Pages of KV in files: whole or a miss, whatever happens to them; a limit; versions."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from milkweed.config import load_mesh
from milkweed.errors import ConfigError
from milkweed.rollout.pages import COUNTS, Counts, Pages, sweep
from milkweed.types import PolicyVersion

V1, V2, V3 = (PolicyVersion(0, i) for i in (1, 2, 3))
NBYTES = 512


def opened(folder: Path, limit: int = 1 << 20, model: str = "m", name: str = "counts", said: list[str] | None = None) -> Pages:
    said = [] if said is None else said
    pages = Pages(folder / model, limit, Counts(folder / name, create=True), said.append)
    pages.serve(V1)
    return pages


def page(seed: int, nbytes: int = NBYTES) -> memoryview:
    return memoryview(bytes((seed * 7 + i) % 256 for i in range(nbytes)))


def read(pages: Pages, key: str, nbytes: int = NBYTES) -> bytes | None:
    into = bytearray(nbytes)
    return bytes(into) if pages.read(key, memoryview(into)) else None


def test_what_one_writes_another_reads_and_both_are_counted(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path, name="other")
    assert not two.has("a") and read(two, "a") is None
    assert one.write("a", page(1)) and one.write("a", page(1)), "a page that is there is not written twice"
    assert two.has("a") and read(two, "a") == bytes(page(1))
    counted, other = one.counts.read(), Counts(tmp_path / "other").read()
    assert 0 < counted.pop("written_us") < 1e6 and 0 < other.pop("read_us") < 1e6
    rest = dict.fromkeys([n for n in COUNTS if not n.endswith("_us")], 0)
    assert counted == rest | {"written": 1, "written_bytes": NBYTES, "read_us": 0}
    assert other == rest | {"read": 1, "read_bytes": NBYTES, "written_us": 0}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(st.data())
def test_a_file_that_is_cut_short_longer_or_has_a_flipped_bit_is_a_miss_and_is_written_anew(tmp_path: Path, data: st.DataObject) -> None:
    pages = opened(tmp_path)
    pages.write("a", page(3))
    file = next(f for f in (tmp_path / "m" / "0.1").iterdir())
    raw = bytearray(file.read_bytes())
    kind = data.draw(st.sampled_from(["cut", "longer", "flip"]))
    if kind == "cut":
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    elif kind == "longer":
        raw += b"\0"
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(raw)
    before = pages.counts.read()["bad"]
    assert read(pages, "a") is None and not pages.has("a") and pages.counts.read()["bad"] == before + 1
    assert pages.write("a", page(3)) and read(pages, "a") == bytes(page(3))


def test_a_page_is_good_only_under_its_own_key_version_and_model(tmp_path: Path) -> None:
    pages = opened(tmp_path)
    other = opened(tmp_path, model="n", name="other")
    for name in ("a", "b", "c"):
        pages.write(name, page(1))
    pages.serve(V2)
    pages.serve(V1)  # it was deleted, being older
    assert not pages.has("c")
    for name in ("a", "b", "c"):
        pages.write(name, page(1))
    old = tmp_path / "m" / "0.1"
    (old / "a").rename(old / "z")
    (old / "b").rename(tmp_path / "n" / "0.1" / "b")
    assert read(pages, "z") is None and read(other, "b") is None
    kept = (old / "c").read_bytes()
    pages.serve(V2)
    (tmp_path / "m" / "0.2" / "c").write_bytes(kept)
    assert read(pages, "c") is None
    assert pages.counts.read()["bad"] == 2 and other.counts.read()["bad"] == 1


def test_older_versions_are_deleted_and_an_engine_that_is_behind_finds_and_leaves_nothing(tmp_path: Path) -> None:
    ahead, behind = opened(tmp_path), opened(tmp_path, name="other")
    (tmp_path / "m" / "notes").mkdir()  # somebody else's
    ahead.write("a", page(1))
    ahead.serve(V3)
    assert not behind.has("a") and read(behind, "a") is None
    assert not behind.write("b", page(2)) and behind.counts.read()["discarded"] == 1
    ahead.write("a", page(4))
    behind.serve(V2)
    assert read(ahead, "a") == bytes(page(4)), "one that is behind deletes nothing newer"
    behind.serve(V3)
    assert read(behind, "a") == bytes(page(4))
    end = time.monotonic() + 5
    while sorted(f.name for f in (tmp_path / "m").iterdir()) != ["0.3", "notes"]:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_limit_holds_and_what_was_used_last_stays(tmp_path: Path) -> None:
    pages = opened(tmp_path, limit=10 * (NBYTES + 64))
    for i in range(10):
        pages.write(f"k{i}", page(i))
        os.utime(tmp_path / "m" / "0.1" / f"k{i}", (i, i))
    assert read(pages, "k0") is not None  # used now
    for i in range(10, 14):
        assert pages.write(f"k{i}", page(i))
        size = sum(f.stat().st_size for f in (tmp_path / "m" / "0.1").iterdir())
        assert size <= pages.limit
    assert pages.has("k0") and not pages.has("k1") and pages.counts.read()["evicted"] >= 4
    assert not pages.write("big", page(0, 20 * NBYTES)) and pages.counts.read()["full"] == 1
    assert read(pages, "k13") == bytes(page(13))


def test_nothing_is_found_or_written_while_the_weights_change(tmp_path: Path) -> None:
    pages = opened(tmp_path)
    pages.write("a", page(1))
    pages.closed = True
    assert not pages.has("a") and read(pages, "a") is None and not pages.write("b", page(2))
    pages.closed = False
    assert read(pages, "a") == bytes(page(1)) and not pages.has("b")


def test_a_disk_without_room_is_said_once_and_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    pages = opened(tmp_path, said=said)
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, [parts[0]]))
    assert not pages.write("a", page(1)) and not pages.write("b", page(1))
    assert len(said) == 1 and "no room" in said[0] and pages.counts.read()["full"] == 2
    monkeypatch.undo()
    assert not list((tmp_path / "m" / "0.1").iterdir()), "nothing half-written is left"
    assert pages.write("a", page(1))


def test_many_writers_of_one_page_and_readers_never_see_half_a_page(tmp_path: Path) -> None:
    all_pages = [opened(tmp_path, name=f"c{i}") for i in range(4)]
    wrong: list[object] = []

    def work(pages: Pages, number: int) -> None:
        for i in range(150):
            key = f"k{i % 10}"
            pages.write(key, page(i % 10))
            got = read(pages, key)
            if got not in (None, bytes(page(i % 10))):
                wrong.append(got)
            if number == 0 and i % 7 == 0:
                pages._remove(pages._path(key))

    threads = [threading.Thread(target=work, args=(p, n)) for n, p in enumerate(all_pages)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and not any(p.counts.read()["bad"] for p in all_pages)
    assert not [f for f in (tmp_path / "m" / "0.1").iterdir() if f.name.startswith(".")]


def test_what_a_run_that_is_gone_left_is_swept(tmp_path: Path) -> None:
    for token in ("gone", "here"):
        (tmp_path / f"mw-{token}-kv" / "m").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    assert sweep(tmp_path, lambda token: token == "here") == ["gone"]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["mine", "mw-here-kv"]


def test_a_tier_that_cannot_be_is_refused_with_its_key() -> None:
    for wrong, key in (
        (["rollout.kv_tier.memory_ratio=0.5"], "rollout.kv_tier.memory_ratio"),
        (["rollout.kv_tier.files_gb=1"], "rollout.kv_tier.files_gb.*memory_ratio"),
        (["rollout.kv_tier.memory_ratio=2", "rollout.kv_tier.files_gb=-1"], "rollout.kv_tier.files_gb"),
        (["rollout.kv_tier.memory_ratio=2", "rollout.kv_tier.files_gb=1", "rollout.kv_tier.folder=here"], "rollout.kv_tier.folder"),
    ):
        with pytest.raises(ConfigError, match=key):
            load_mesh("local", wrong)
