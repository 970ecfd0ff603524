"""The process in which a model's code runs. Started by path from `execution.py`, imports nothing of the package."""

import builtins
import importlib.util
import json
import os
import sys


def main() -> None:
    serve(*enclosed())


def enclosed():
    """Shut this process in as the arguments say. Returns what it reads requests from, the descriptor that it answers
    on, and the isolation that the kernel lent."""
    reader, writer, parent, memory, processes, file_bytes = map(int, sys.argv[1:7])
    folder = sys.argv[7]
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox.py")
    spec = importlib.util.spec_from_file_location("_milkweed_sandbox", here)
    assert spec is not None and spec.loader is not None
    box = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(box)
    wanted = box.CLONE_NEWUSER | box.CLONE_NEWNS | box.CLONE_NEWNET | box.CLONE_NEWIPC
    got = box.fork_guarded(parent, wanted)
    isolation = ["pid"] if got else []
    if got & box.CLONE_NEWNET:
        isolation.append("network")
    if got & box.CLONE_NEWNS:
        try:
            box.read_only_but(folder, file_bytes)
            isolation.append("files")
        except OSError:
            pass  # the reply says that files are not protected
    os.chdir(folder)
    box.limit(core=0, data=memory, fsize=file_bytes, nofile=256, cpu=3600)
    if got and os.geteuid() != 0:
        box.limit(nproc=processes)
    box.drop_privileges()
    os.set_inheritable(reader, False)
    os.set_inheritable(writer, False)
    return os.fdopen(reader, "r", encoding="utf-8"), writer, ",".join(isolation)


def serve(reader, writer, isolation) -> None:
    # taken now: the program may replace any of them
    loads, dumps, write, execute, make, leave = json.loads, json.dumps, os.write, exec, compile, os._exit
    streams = (sys.stdout, sys.stderr)
    text, plain = repr, _plain

    def send(value) -> None:
        write(writer, (dumps(value) + "\n").encode())

    def flush() -> None:
        for stream in streams:
            try:
                stream.flush()
            except (OSError, ValueError):
                pass  # the program closed it, or its reader has had enough: no matter

    send({"isolation": isolation})
    source = loads(reader.readline())["source"]
    sys.argv = ["program.py"]
    names = {"__name__": "__main__", "__builtins__": builtins}
    try:
        execute(make(source, "program.py", "exec"), names)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            import traceback

            traceback.print_exc()
            send({"raised": type(error).__name__})
        flush()
        leave(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
    flush()
    send({"word": ""})
    while line := reader.readline():
        test = loads(line)
        value = None
        try:
            if "call" in test:
                value = text(plain(names[test["call"]](*test.get("args", ()), **test.get("kwargs", {}))))
            else:
                execute(make(test["check"], "test.py", "exec"), names)
                value = True
        except BaseException:
            import traceback

            traceback.print_exc()
        send({"word": test["word"], "value": value})
    leave(0)


def _plain(value):
    """A copy of exact built-in types only: what a subclass says about itself is not to be believed."""
    kind = type(value)
    if kind in (int, float, str, bytes, bool, type(None), complex):
        return value
    if kind in (list, tuple, set, frozenset):
        return (list if kind is list else tuple if kind is tuple else set)(_plain(v) for v in value)
    if kind is dict:
        return {_plain(k): _plain(v) for k, v in value.items()}
    raise TypeError(f"a {kind.__name__} is not a plain value")


if __name__ == "__main__":
    main()
