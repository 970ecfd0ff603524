"""A host's puller for the fault tests: a process of its own that pulls when told to, and that a test may have struck in
the middle of a pull. Not a test.

`python transfer_reader.py <connection's descriptor> <token>`: receives `(method, args)`, answers `(ok, value)`.
"""

import asyncio
import os
import sys
import time
from multiprocessing.connection import Connection

from milkweed.errors import TransferError
from milkweed.transfer import nixl
from milkweed.transfer.puller import Puller


class Reader:
    def __init__(self, token: str) -> None:
        self.puller = Puller(token, "reader")

    def pull(self, manifest, deadline_s, holders=()):
        began = time.monotonic()
        try:
            return asyncio.run(self.puller.pull(manifest, deadline_s, holders)), time.monotonic() - began
        except TransferError as error:
            return error, time.monotonic() - began

    def strike(self, after, number, pid=None):
        """Send `number` to `pid` (this process if None) as soon as `after` more READs were started."""
        start, left = nixl.Read.start, [after]

        def counted(read):
            done = start(read)
            left[0] -= 1
            if left[0] == 0:
                os.kill(pid or os.getpid(), number)
            return done

        nixl.Read.start = counted

    def __getattr__(self, name):
        return getattr(self.puller, name)


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    reader = Reader(sys.argv[2])
    connection.send((True, os.getpid()))
    while True:
        try:
            method, args = connection.recv()
        except EOFError:  # the test is over
            reader.puller.close()
            return
        try:
            connection.send((True, getattr(reader, method)(*args)))
        except Exception as error:
            connection.send((False, error))


if __name__ == "__main__":
    main()
