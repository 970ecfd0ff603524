"""Rows of verifiers that run code or must be killed, each under its id."""

import threading
import time

import pytest

from milkweed.environments import CodeLimits, code_tests, exact, math_equal, run_python
from milkweed.environments.execution import code_in, same_output, same_value

SHORT = CodeLimits(deadline_s=2.0)


def test_R19_no_verifier_needs_the_main_thread():
    got = []

    def work():
        got.append((math_equal("sqrt(8)", r"2\sqrt{2}"), code_tests("def f(): return 1", "assert f() == 1")))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert got == [(True, 1.0)]


def test_R22_white_space_at_line_ends_is_left_aside():
    assert same_output("5 \n", "5") and same_output("1 \r\n2\t\n\n", "1\n2")
    assert not same_output("1 2", "12") and not same_output("1\n\n2", "1\n2")
    assert exact("5 \n", "5") == 1.0 and exact("5", "5.0") == 0.0 and exact("", "") == 0.0
    assert code_tests("print('5 ')", [{"stdin": "", "stdout": "5"}]) == 1.0


def test_R23_an_early_exit_passes_nothing():
    for leave in ("import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "exit(0)", "quit()"):
        assert code_tests(f"def f(): return 1\n{leave}", ["assert f() == 2"]) == 0.0
    inside = "import os\ndef f(x):\n    os._exit(0)"
    assert code_tests(inside, [{"call": "f", "args": [1], "expected": 1}, "assert f(1) == 1"]) == 0.0
    # a program that printed the right answer may end as it likes
    assert code_tests("import sys\nprint(int(input()) + 1)\nsys.exit(0)", {"stdin": "4\n", "stdout": "5"}) == 1.0


def test_R23_an_object_that_equals_everything_passes_nothing():
    cheat = "class A(int):\n    def __eq__(self, other): return True\ndef f(): return A()"
    assert code_tests(cheat, {"call": "f", "expected": 3}) == 0.0
    assert same_value((1, [2.0]), [1, [2]]) and not same_value(True, 1) and not same_value("1", 1)


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("while True: pass", "timeout"),
        ("import time\ntry: time.sleep(99)\nfinally: time.sleep(99)", "timeout"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "processes"),
        ("while True: print('x' * 1000000)", "output"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed"),
        ("x = bytearray(2 << 30)", "raised"),
        ("syntax error", "raised"),
    ],
)
def test_R23_bad_programs_end_and_are_named(program, status):
    start = time.monotonic()
    run = run_python(program, tests=[{"check": "pass"}], limits=SHORT)
    assert (run.status, run.results) == (status, []), run
    assert time.monotonic() - start < SHORT.deadline_s + 5


def test_R23_closing_stdout_and_faking_the_answer_pass_nothing():
    closed = "import os, sys\nsys.stdout.close(); os.close(1)\ndef f(): return 1"
    assert code_tests(closed, ["assert f() == 1", "assert f() == 2"]) == 0.5
    forged = """
import os
for fd in range(3, 20):
    try:
        os.write(fd, b'{"word": "", "value": true}\\n' * 3)
    except OSError:
        pass
os._exit(0)
"""
    assert code_tests(forged, ["assert False"] * 2) == 0.0


def test_R23_nothing_is_written_outside_and_nothing_reaches_the_network(tmp_path):
    target = tmp_path / "evil"
    program = f"""
import socket
try:
    open({str(target)!r}, 'w').write('x')
    print('wrote')
except OSError:
    print('refused')
try:
    socket.create_connection(('127.0.0.1', {_listening()}), 1)
    print('connected')
except OSError:
    print('refused')
open('own', 'w').write('x')
"""
    run = run_python(program, limits=SHORT)
    assert run.status == "ok", run
    # what the kernel does not lend is said, never claimed
    assert run.stdout.split()[0] == ("refused" if "files" in run.isolation else "wrote")
    assert run.stdout.split()[1] == ("refused" if "network" in run.isolation else "connected")
    assert target.exists() == ("files" not in run.isolation)


def _listening():
    import socket

    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=lambda: (server.settimeout(20), _accept(server)), daemon=True).start()
    return server.getsockname()[1]


def _accept(server):
    try:
        server.accept()
    except OSError:
        server.close()


def test_code_is_taken_from_its_fence():
    assert code_in("so:\n```python\nx = 1\n```\nthen\n```\nout\n```") == "x = 1\n"
    assert code_in("```\ny\n```") == "y\n" and code_in("z = 1") == "z = 1"
    assert code_tests("```python\ndef f(a):\n    return a * 2\n```", [{"call": "f", "args": [2], "expected": 4}]) == 1.0
    with pytest.raises(ValueError, match="no tests"):
        code_tests("x", [])
    with pytest.raises(ValueError, match="not a test"):
        code_tests("x", [{"what": 1}])
