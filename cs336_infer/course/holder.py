"""The first process of a sandbox: it takes in orphans, and when it ends the kernel ends everybody else there.

A fresh start forks the submission from it (`student`). A forked start has it make the namespaces and hand them over
(`main`); the process that the zygote forked is then adopted by it, and is its child like the other.

Another program in its place would be outside the filter of system calls and the limits, and within the student's
reach through /proc/1/mem. This file travels into the sandbox: standard library only.
"""

import contextlib
import os
import resource
import select
import signal
import sys

NAMESPACES = ("cgroup", "ipc", "uts", "net", "pid", "mnt", "user")
"""In the order in which they are handed over."""


def restrict(limits: dict[str, int]) -> None:
    """The limits the kernel keeps, for this process and all it starts. They cannot be raised again.

    Processor time ends with SIGXCPU, which says what happened, and a few seconds later with SIGKILL.
    """
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        most = value + 5 if name == "RLIMIT_CPU" else value
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (min(value, most), most))
    try:
        with open("/proc/self/oom_score_adj", "w") as adjustment:
            adjustment.write("1000")
    except OSError:
        pass


def stay(child: int, reading: int) -> None:
    """Stays until `child` ends, and reports how, or until nobody is left who could write into `reading`: a killed
    grader leaves nothing behind. The kernel ignores signals to the first process from inside."""

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                ended, status, used = os.wait3(os.WNOHANG)
                if ended == 0:
                    return
                if ended == child:
                    break
            code = os.waitstatus_to_exitcode(status)
            if code == -signal.SIGKILL and used.ru_utime + used.ru_stime >= resource.getrlimit(resource.RLIMIT_CPU)[0]:
                code = -signal.SIGXCPU  # killed at the second limit
            os._exit(code if code >= 0 else 128 - code)

    signal.signal(signal.SIGCHLD, reap)
    reap()
    hung_up = select.poll()
    hung_up.register(reading, 0)
    hung_up.poll()
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Hands over the namespaces and takes in the process that enters them.

    `arguments`: the descriptors of the socket to hand over by and of the student's pipe, then NAME=value of each limit.
    """
    import socket

    link_fd, reading, *limits = arguments
    restrict({name: int(value) for name, value in (each.split("=") for each in limits)})
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with socket.socket(fileno=int(link_fd)) as link:
        spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
        socket.send_fds(link, [b"%d %d" % (os.getuid(), os.getgid())], spaces)
        for each in spaces:
            os.close(each)
        child = link.recv(32)
    if not child:
        os._exit(70)  # nobody entered
    stay(int(child), int(reading))


if __name__ == "__main__":
    main(sys.argv[1:])
