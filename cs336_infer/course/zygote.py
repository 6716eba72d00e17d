"""The process from which submissions are forked: it has imported what they need, and has seen nothing else.

It is a fresh program with an empty environment, given the source of the answering side. It never reads a submission
or a check. For each start it gets three descriptors: the two pipes of the grader, and a socket on which the first
process of a new sandbox (`holder`) hands over its namespaces. Three forks lead inside:

    A  enters the namespaces; for the process namespace that counts for its children only
    B  is born in it and ends at once, so that its child is adopted by the holder
    C  gives up everything that could lead outside, looks whether it is gone, and becomes the student's process

The order matters: the filter of system calls forbids entering a namespace, so it comes last. What C keeps of the
outside are two pipes and private memory. The file of its own program is on a mount of the outside that may be
writable: it must belong to another user (`exposed`).

Standard library only; this source is executed in a process of its own, and stays out of the sandbox's files.
"""

import array
import contextlib
import ctypes
import fcntl
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import sys
import types
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

NAMESPACES = {
    "cgroup": 0x02000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "net": 0x40000000,
    "pid": 0x20000000,
    "mnt": 0x00020000,
    "user": 0x10000000,
}
"""CLONE_NEW* of each, in the order in which the holder hands them over."""
NS_GET_USERNS = 0xB701
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 4, 22, 24, 38, 47
CAPABILITY_VERSION_3 = 0x20080522
MESSAGE = 1 << 16
BORN = b"born"
HAND_OVER_MS = 30_000
EMPTY = {"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"}

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """This start cannot be done here; one line."""


def main(given: dict[str, Any]) -> str:
    """Returns in each submission's process, inside its sandbox, with the arguments for `answering.student.main`.

    Args:
        given: "control" (descriptor of the socket of requests), "package" (its name, folder and sources), "torch"
            (whether to import it), "home", "filter" (of system calls, in hex).
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    install(**given["package"])
    if given["torch"]:
        sys.modules["answering.student"].preload()
    control = socket.socket(fileno=given["control"])
    problem = unfit({0, 1, 2, control.fileno()})
    control.send(json.dumps({"problem": problem, "loaded": sorted(sys.modules)}).encode())
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, MESSAGE, 3)
        if not request:
            os._exit(0)  # the grader is gone, or done
        told, telling = os.pipe()
        child = os.fork()
        if child == 0:
            control.close()
            os.close(told)
            return born(json.loads(request), descriptors, telling, given)
        for each in (*descriptors, telling):
            os.close(each)
        with open(told, "rb") as answer:
            said = answer.read(MESSAGE)
        os.waitpid(child, 0)
        control.send(said or b"it ended without a word")


def install(name: str, folder: str, sources: dict[str, str]) -> None:
    """The package as if it had been imported from `folder`, which exists in the sandboxes only."""
    package = types.ModuleType(name)
    package.__path__ = [f"{folder}/{name}"]
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    sys.modules[name] = package
    for part, source in sources.items():
        path = f"{folder}/{name}/{part}.py"
        spec = importlib.util.spec_from_file_location(f"{name}.{part}", path, loader=SourceFileLoader(part, path))
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
        setattr(package, part, module)
    sys.path.insert(0, folder)


def unfit(expected: set[int]) -> str:
    """Why no submission may be forked from this process: empty, or one line."""
    with open("/proc/self/maps") as maps:
        shared = [line.split() for line in maps if line.split()[1][1::2] == "ws"]
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"it has {threads} threads"
    if shared:
        return f"it shares memory that can be written: {shared[0][-1]}"
    if open_now := descriptors_open() - expected:
        return f"it has descriptors open: {sorted(open_now)}"
    if exposed():
        return "its program's file belongs to the user that submissions run as"
    return ""


def exposed() -> bool:
    """Whether the program's file, which each child reaches through /proc/self/exe on a mount of the outside, could be
    changed by it. Root's children are another user, who owns nothing."""
    file = os.stat("/proc/self/exe")
    if os.geteuid() == 0:
        return bool(file.st_mode & 0o002)
    return file.st_uid == os.geteuid() or os.access("/proc/self/exe", os.W_OK)


def descriptors_open() -> set[int]:
    names = os.listdir("/proc/self/fd")  # with the one that reads the folder
    return {int(name) for name in names if os.path.lexists(f"/proc/self/fd/{name}")}


def born(request: dict[str, Any], descriptors: list[int], telling: int, given: dict[str, Any]) -> str:
    """Leads a fork into its sandbox. Only C returns; A and B end here. What goes wrong is told."""
    try:
        reading, writing, link_fd = descriptors
        outside = {path for path in sys.path if os.path.exists(path)}
        with socket.socket(fileno=link_fd) as link:
            uid, gid = enter(link)
            adopted = fork_twice(telling)
            os.read(adopted, 1)  # nothing, once A has seen B end
            os.close(adopted)
            if os.getppid() != 1:
                raise Refused("the sandbox's first process did not adopt it")
            drop(uid, gid, given["home"], bytes.fromhex(given["filter"]))
            forget(given["home"], outside)
            link.send(b"%d" % os.getpid())
        close_all_but({0, 1, 2, reading, writing, telling})
        inspect(uid, {0, 1, 2, reading, writing, telling})
        os.write(telling, BORN)
        os.close(telling)
        return json.dumps({"reading": reading, "writing": writing, "limits": request["limits"]})
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(telling, f"{type(error).__name__}: {error}".encode()[:500])
        os._exit(71)


def enter(link: socket.socket) -> tuple[int, int]:
    """A: into the namespaces that come over `link`. Returns the ids of the holder."""
    readable = select.poll()
    readable.register(link, select.POLLIN)
    if not readable.poll(HAND_OVER_MS):
        raise Refused("the sandbox's first process says nothing")
    message, spaces, _, _ = socket.recv_fds(link, 64, len(NAMESPACES))
    if len(spaces) != len(NAMESPACES):
        raise Refused("the sandbox's first process ended")
    uid, gid = map(int, message.split())
    own = {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in NAMESPACES}
    found = dict(zip(NAMESPACES, spaces, strict=True))
    kept = [n for n in ("ipc", "uts", "net", "pid", "mnt") if os.fstat(found[n]).st_ino == own[n]]
    if kept:
        raise Refused(f"the sandbox shares with the outside: {', '.join(kept)}")
    user = found.pop("user")
    owner = fcntl.ioctl(found["mnt"], NS_GET_USERNS)
    inside = own["user"]
    if os.fstat(owner).st_ino != inside:  # bubblewrap mounts in one user namespace and may run programs in one below
        inside = os.fstat(owner).st_ino
        call("setns", owner, NAMESPACES["user"])
    for name, space in found.items():
        if os.fstat(space).st_ino != own[name]:
            call("setns", space, NAMESPACES[name])
    if os.fstat(user).st_ino != inside:
        call("setns", user, NAMESPACES["user"])
    for each in (*spaces, owner):
        os.close(each)
    return uid, gid


def fork_twice(telling: int) -> int:
    """Returns in C a descriptor that is at its end when B is gone and A has seen it."""
    adopted, held = os.pipe()
    if b := os.fork():
        os.close(telling)
        os._exit(0 if os.waitpid(b, 0)[1] == 0 else 71)
    os.close(held)
    if os.fork():
        os._exit(0)
    return adopted


def drop(uid: int, gid: int, home: str, filter_: bytes) -> None:
    """C: no rights, the filter of system calls, and what a program of its own would have been started with."""
    os.chdir(home)
    os.setsid()
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # the kernel knows no more; `inspect` sees whether one is left
    call("prctl", PR_CAP_AMBIENT, 4, 0, 0, 0)
    if os.getresuid() != (uid, uid, uid):
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    header = ctypes.create_string_buffer(struct.pack("<Ii", CAPABILITY_VERSION_3, 0))
    call("capset", header, ctypes.create_string_buffer(24))
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # lost with the user; a program that is started has it
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    code = ctypes.create_string_buffer(filter_, len(filter_))
    program = array.array("Q", [len(filter_) // 8, ctypes.addressof(code)])  # struct sock_fprog, padded
    call("prctl", PR_SET_SECCOMP, 2, ctypes.c_void_p(program.buffer_info()[0]), 0, 0)


def forget(home: str, outside: set[str]) -> None:
    """Random states that all submissions would share, and what was read outside; `outside`: import paths that were
    there."""
    os.environ["HOME"] = os.environ["PWD"] = home
    sys.path[:] = [path for path in sys.path if path not in outside or os.path.exists(path)]
    sys.path_importer_cache.clear()
    if linecache := sys.modules.get("linecache"):
        linecache.clearcache()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()  # Python's own `random` does it by itself


def close_all_but(kept: set[int]) -> None:
    for each in descriptors_open() - kept:
        os.close(each)


def inspect(uid: int, expected: set[int]) -> None:
    """Refuses to go on when anything of the outside is left."""
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    left = [name for name in EMPTY if int(status[name], 16)]
    if left or status["Seccomp"] != "2" or status["NoNewPrivs"] != "1" or status["Threads"] != "1":
        raise Refused(f"rights are left: {left}, {status['Seccomp']}, {status['NoNewPrivs']}, {status['Threads']}")
    if status["Uid"].split() != [str(uid)] * 4 or 0 in os.getresuid() + os.getresgid():
        raise Refused("it runs as another user than its sandbox")
    if descriptors_open() != expected:
        raise Refused(f"descriptors are open: {sorted(descriptors_open() - expected)}")


def call(name: str, *arguments: Any) -> None:
    """A function of the C library that returns 0, or OSError."""
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
