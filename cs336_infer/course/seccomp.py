"""The system calls a sandboxed process does not get, as a filter program for the kernel (seccomp, classic BPF).

Namespaces take away files, network and other processes. What is left are calls that give memory which no limit
counts (`memfd_create`, System V shared memory, a file system mounted in a user namespace of one's own), socket
families that are not cut off with the network (vsock reaches the host of a virtual machine), and parts of the
kernel with a record of holes. Each refused call returns EPERM, so ordinary libraries see an ordinary error.
`clone3` returns ENOSYS: its flags lie in memory where a filter cannot look, and the C library then uses `clone`.
"""

import errno
import platform
import struct

# name: number on (x86_64, aarch64)
DENIED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
}
SOCKET = (41, 198)
SOCKETPAIR = (53, 199)
CLONE = (56, 220)
CLONE3 = (435, 435)
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: bound to the (empty) network namespace
NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW* flag

_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW = 0x7FFF0000
_DENY = 0x00050000 | errno.EPERM
_NO_CALL = 0x00050000 | errno.ENOSYS
_KILL = 0x80000000
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16


def program(machine: str = "") -> bytes:
    """The filter for `bwrap --seccomp`. `NotImplementedError` on a processor whose call numbers are not listed here."""
    machine = machine or platform.machine()
    if machine not in _ARCHES:
        raise NotImplementedError(f"no list of system calls for {machine}; there are: {', '.join(_ARCHES)}")
    column, arch = _ARCHES[machine]
    code = [
        _op(_LOAD, _ARCH),
        _op(_EQUAL, arch, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER),
        _op(_AT_LEAST, 0x40000000, 0, 1),  # the x32 numbers, a second name for every call
        _op(_RETURN, _NO_CALL),
        _op(_EQUAL, CLONE3[column], 0, 1),
        _op(_RETURN, _NO_CALL),
    ]
    for numbers in DENIED.values():
        code += [_op(_EQUAL, numbers[column], 0, 1), _op(_RETURN, _DENY)]
    code += [
        _op(_EQUAL, CLONE[column], 0, 3),
        _op(_LOAD, _ARGUMENT),
        _op(_ANY_BIT, NEW_NAMESPACES, 0, 5 + len(FAMILIES)),
        _op(_RETURN, _DENY),
        _op(_EQUAL, SOCKET[column], 1, 0),
        _op(_EQUAL, SOCKETPAIR[column], 0, 2 + len(FAMILIES)),
        _op(_LOAD, _ARGUMENT),
    ]
    code += [_op(_EQUAL, family, len(FAMILIES) - i, 0) for i, family in enumerate(FAMILIES)]
    code += [_op(_RETURN, _DENY), _op(_RETURN, _ALLOW)]
    return b"".join(code)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction; the two jumps skip that many of the following ones."""
    return struct.pack("<HBBI", code, if_true, if_false, value)
