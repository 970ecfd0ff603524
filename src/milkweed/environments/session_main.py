"""The process behind the Python and shell tools: keeps its state between requests. Started by path, like
`runner.py`."""

import ast
import builtins
import importlib.util
import json
import os
import subprocess
import sys
import traceback


def main() -> None:
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "runner.py")
    spec = importlib.util.spec_from_file_location("_milkweed_runner", here)
    assert spec is not None and spec.loader is not None
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    serve(*runner.enclosed())


def serve(reader, writer, isolation) -> None:
    names = {"__name__": "__main__", "__builtins__": builtins}
    state = os.path.join(os.getcwd(), ".shell-state")
    write, dumps, loads = os.write, json.dumps, json.loads
    write(writer, (dumps({"isolation": isolation}) + "\n").encode())
    while line := reader.readline():
        request = loads(line)
        if "shell" in request:
            shell(request["shell"], state)
        else:
            python(request["python"], names)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass  # the code closed it: its own loss
        write(writer, (dumps({"word": request["word"]}) + "\n").encode())


def python(source: str, names: dict) -> None:
    """Run `source`; the value of a last expression is printed, as at a prompt."""
    try:
        tree = ast.parse(source, "cell.py")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell.py", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell.py", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit as leaving:
        print(f"(exit {leaving.code})")
    except BaseException as error:
        # without our own frames
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        print("".join(traceback.format_exception(type(error), error, frames)), end="")


def shell(command: str, state: str) -> None:
    """Run `command` in bash with the directory and variables that the last one left."""
    script = (
        f'[ -f "{state}" ] && . "{state}"\ntrap \'{{ export -p; echo "cd \\"$PWD\\""; }} > "{state}"\' EXIT\n{command}'
    )
    sys.stdout.flush()
    try:
        code = subprocess.run(["bash", "-c", script], stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT).returncode
    except OSError as error:
        print(f"bash did not start: {error}")
        return
    if code:
        print(f"(exit {code})")


if __name__ == "__main__":
    main()
