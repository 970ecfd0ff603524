"""Processes that end for sure: a parent-death signal, limits, namespaces where the kernel lends them, and a kill that
takes every descendant along. Standard library only, and cheap to import: it runs at the start of every child.

What is used, best first: a PID namespace (its end is the end of all in it, whatever they did to hide), else a
subreaper (orphans come back to it) and a sweep that stops everything before it kills.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 1, 2, 4, 0x4000, 0x40000
SYS_MOUNT_SETATTR = 442  # the same number on every architecture
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = -100, 0x8000, 1
NOBODY = 65534

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttr(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint64) for n in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def die_with_parent(parent: int) -> None:
    """Be killed when the thread that started this process ends. `parent` is the pid expected to be alive."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:  # it ended before the signal was asked for
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")


def unshare(flags: int) -> None:
    """Raises OSError where the kernel or its policy refuses."""
    _check(_libc.unshare(flags), "unshare")


def limit(**limits: int) -> None:
    """Set resource limits by name (`limit(data=1 << 30, nofile=256)`), never above what is already the hard one."""
    for name, value in limits.items():
        which = getattr(resource, f"RLIMIT_{name.upper()}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def read_only_but(folder: str, bytes_: int) -> None:
    """Make every mount read-only in this mount namespace, except an empty memory file system at `folder`."""
    _check(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "make mounts private")
    attributes = _MountAttr(attr_set=MOUNT_ATTR_RDONLY)
    _check(
        _libc.syscall(
            SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes)
        ),
        "mount_setattr",
    )
    options = f"size={bytes_},mode=777,nr_inodes=4096".encode()
    _check(_libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", MS_NOSUID | MS_NODEV, options), "mount tmpfs")


def drop_privileges() -> None:
    """Give up every capability for good, root's too; setuid programs give nothing from here on."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            if ctypes.get_errno() == errno.EINVAL:
                break  # this kernel has no more
            if os.geteuid() == 0:
                _check(-1, "PR_CAPBSET_DROP")
            break  # an ordinary user holds none
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")


def descendants(root: int, most: int = 100_000) -> list[int]:
    """Pids of all descendants of `root` (not itself), at most about `most`; zombies are left out."""
    found: list[int] = []
    todo = [root]
    while todo and len(found) <= most:
        pid = todo.pop()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    todo += map(int, file.read().split())
            with open(f"/proc/{pid}/stat") as file:
                zombie = file.read().rpartition(")")[2].split()[0] == "Z"
        except (OSError, IndexError):  # it ended while it was read
            continue
        if pid != root and not zombie:
            found.append(pid)
    return found


def kill_descendants(root: int, deadline_s: float = 5.0) -> bool:
    """Kill every descendant of `root`; True when none is left. All are stopped first, so that none can fork on."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        stopped: set[int] = set()
        while (new := set(descendants(root)) - stopped) and time.monotonic() < end:
            for pid in new:
                _signal(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            _signal(pid, signal.SIGKILL)
        if not descendants(root):
            return True
        time.sleep(0.005)
    return not descendants(root)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # already gone, which is what is wanted


def fork_guarded(parent: int, namespaces: int = 0, isolate: bool = True) -> int:
    """Fork so that the caller's process stands guard and the worker returns from this call.

    Returns, in the worker only, the namespaces it is in: those asked for and a PID namespace, or fewer where the
    kernel refuses. The guard waits for the worker, ends everything the worker left behind, and exits as it did
    (128 + n for signal n). With a PID namespace a second guard is its init, so that the worker is an ordinary
    process to which signals have their ordinary effect. The guard dies with the thread of `parent` that started it.
    """
    die_with_parent(parent)
    all_ = namespaces | CLONE_NEWPID
    wanted = dict.fromkeys((all_, all_ & ~CLONE_NEWUSER, CLONE_NEWPID)) if isolate else ()
    got = next((f for f in wanted if _allowed(f)), 0)
    if got:
        _enter(got)
        die_with_parent(parent)  # a change of credentials took the signal away
    adopt_orphans()
    _guard_fork()
    if got & CLONE_NEWPID:
        _guard_fork()
    return got


def _allowed(flags: int) -> bool:
    """Whether `_enter(flags)` works here, tried in a process that is thrown away: a failure half-way leaves one
    that is fit for nothing."""
    if os.geteuid() == 0 and flags & CLONE_NEWUSER and not (_open_to_all(os.__file__) and _open_to_all(__file__)):
        return False  # nobody could not import from this Python
    probe = os.fork()
    if probe == 0:
        try:
            _enter(flags)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(probe, 0)[1] == 0


def _open_to_all(path: str) -> bool:
    path = os.path.realpath(path)
    ok = bool(os.stat(path).st_mode & 0o004)
    while ok and path != "/":
        path = os.path.dirname(path)
        ok = bool(os.stat(path).st_mode & 0o001)
    return ok


def _enter(flags: int) -> None:
    """Unshare; by way of a user namespace where we are not root. Root that asks for one becomes nobody in it, so
    that limits on the number of processes hold."""
    if os.geteuid() != 0:
        uid, gid = os.geteuid(), os.getegid()
        unshare(flags | CLONE_NEWUSER)
        _map_user("self", uid, gid)
    elif flags & CLONE_NEWUSER:
        _become_nobody(flags)
    else:
        unshare(flags)


def _map_user(pid: int | str, uid: int, gid: int) -> None:
    for name, value in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(value)


def _become_nobody(flags: int) -> None:
    """As root the map must be written from outside the new namespace: by a helper forked before."""
    reader, writer = os.pipe()
    me = os.getpid()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(writer)
            if os.read(reader, 1):
                _map_user(me, NOBODY, NOBODY)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(reader)
    try:
        unshare(flags)
        os.write(writer, b"x")
    finally:
        os.close(writer)
        status = os.waitpid(helper, 0)[1]
    if status != 0:
        raise OSError(1, "the user map was refused")
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _guard_fork() -> None:
    """Fork; the parent becomes the guard and never returns."""
    parent = os.getpid()
    worker = os.fork()
    if worker == 0:
        # in a new PID namespace the parent's pid is not visible: 0 stands for it
        _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
        if os.getppid() not in (parent, 0):
            os._exit(1)
        return
    os.closerange(3, 4096)  # the worker's pipes must end with the worker
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            os._exit(1)
        if pid == worker:
            if os.getpid() != 1:  # the end of a namespace's init ends all in it
                kill_descendants(os.getpid())
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


if sys.platform != "linux":
    raise ImportError("milkweed's sandboxes need Linux")
