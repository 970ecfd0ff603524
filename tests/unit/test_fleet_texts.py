"""What the fleet says of a failure is the part a reader needs."""

from __future__ import annotations

from pathlib import Path

from milkweed.fleet.host import tail
from milkweed.fleet.replica import own_frames

TRACE = """Traceback of where the remote call failed (most recent call last):
  File "/x/site-packages/monarch/_src/actor/actor_mesh.py", line 1, in handle
    result = await the_method(*args, **kwargs)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/x/milkweed/fleet/monarch_compat.py", line 2, in call
    return await method(*args, **kwargs)
  File "/home/me/recipe.py", line 14, in score
    return 1 / 0
           ~~^~~
ZeroDivisionError: division by zero
"""


def test_a_remote_traceback_keeps_the_actors_own_frames() -> None:
    assert own_frames(TRACE).splitlines() == [
        "Traceback of where the remote call failed (most recent call last):",
        '  File "/home/me/recipe.py", line 14, in score',
        "    return 1 / 0",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
    ]


def test_the_tail_of_a_log_is_of_this_replica_and_short(tmp_path: Path) -> None:
    log = tmp_path / "rollout0.log"
    assert tail(log) == ""
    log.write_text("of its predecessor\n")
    since = log.stat().st_size
    with log.open("a") as f:
        f.writelines(f"line {i} {'x' * 300}\n" for i in range(200))
    last = tail(log, since, lines=3).splitlines()
    assert [line.split()[1] for line in last] == ["197", "198", "199"]
    log.write_text("of its predecessor\nown\n")
    assert tail(log, since) == "own"
    log.write_text("x" * 5000 + "\nlast")
    assert [len(line) for line in tail(log).splitlines()] == [504, 4]
