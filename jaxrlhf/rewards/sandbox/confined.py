"""Sandbox entry program, started by `sandbox.py`: confines its own process for good, then runs foreign code in it.

Nothing here needs root. Landlock denies access to files other than the process's directory and the interpreter's
files. A seccomp filter refuses system calls that create sockets, processes or shared memory, that signal, control or
watch others, or that change a file's permissions. The code cannot start processes, so the limits below hold for all
that it does. The filter has the parent count the calls that no limit bounds: new threads, files and folders. This
program is started as a file, so it imports nothing of the package.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
import types

LANDLOCK_ABI = 3  # the first version that restricts truncation
LANDLOCK_CREATE, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT = 444, 445, 446
READ = 0b1100  # files and directories
WRITE_FILE = 1 << 1
EVERYTHING = (1 << 15) - 1  # execute, read, write, make, remove, link, truncate
DEVICES = 1 << 6 | 1 << 11  # rights in `EVERYTHING` to make device files

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
ALLOW, ASK, KILL, REFUSE = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
LOAD, AND, EQUAL, ANY_BIT, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x45, 0x35, 0x06  # operations of the filter
X32 = 0x40000000
CLONE_THREAD = 0x10000
NEW_FILE = os.O_CREAT | getattr(os, "O_TMPFILE", 0) & ~os.O_DIRECTORY

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below, kernel's architecture id
SECCOMP = (317, 277)
# fmt: off
REFUSED = {  # call numbers on x86-64 and on arm64; None where the call does not exist
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "io_uring_setup": (425, 425),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "ioprio_set": (251, 30),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "io_setup": (206, 0), "syslog": (103, 116), "seccomp": SECCOMP,
}
COUNTED = {
    "creat": (85, None), "mkdir": (83, None), "mkdirat": (258, 34), "mknod": (133, None), "mknodat": (259, 33),
    "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
}
# fmt: on
# The filter cannot see flags behind a pointer; if a call is reported missing, the C library uses an older one.
MISSING = {"clone3": (435, 435), "openat2": (437, 437)}
CAPSET = (126, 91)

DENY, PASS = (RETURN, 0, 0, REFUSE | errno.EPERM), (RETURN, 0, 0, ALLOW)
COUNT, LACK = (RETURN, 0, 0, ASK), (RETURN, 0, 0, REFUSE | errno.ENOSYS)
FIRST, SECOND, THIRD = (LOAD, 0, 0, 16), (LOAD, 0, 0, 24), (LOAD, 0, 0, 32)  # load an argument of the call
EXAMINED = {  # calls that are allowed except for some arguments
    "clone": ((56, 220), [FIRST, (ANY_BIT, 1, 0, CLONE_THREAD), DENY, COUNT]),  # a thread, not a process
    "open": ((2, None), [SECOND, (ANY_BIT, 0, 1, NEW_FILE), COUNT]),
    "openat": ((257, 56), [THIRD, (ANY_BIT, 0, 1, NEW_FILE), COUNT]),
    "prlimit": ((302, 261), [FIRST, (EQUAL, 1, 0, 0), DENY]),  # only for this process
    "prctl": ((157, 167), [FIRST, (EQUAL, 0, 1, PR_SET_PDEATHSIG), DENY]),
    "socketpair": (
        (53, 199),  # two local ends; as streams they can reach no other socket
        [FIRST, (EQUAL, 1, 0, socket.AF_UNIX), DENY, SECOND, (AND, 0, 0, 15), (EQUAL, 1, 0, socket.SOCK_STREAM), DENY],
    ),
    # 8 and 15 set a file's signal receiver, 1024 makes others wait for their writes, 1026 watches a folder
    "fcntl": ((72, 25), [SECOND, *[step for way in (8, 15, 1024, 1026) for step in ((EQUAL, 0, 1, way), DENY)]]),
    "ioctl": ((16, 29), [SECOND, (EQUAL, 0, 1, 0x8901), DENY, (EQUAL, 0, 1, 0x8902), DENY]),  # the receiver too
}

_libc = ctypes.CDLL(None, use_errno=True)


def main(fd: int, parent_fd: int) -> None:
    """Run the job in the file `fd`; afterwards the file holds the job's secret if the whole job ran.

    Args:
      parent_fd: Socket that gets the reason if this machine cannot confine the program, or else the file descriptor
        through which the parent answers the filter. It is closed before the program runs, so the program can send
        neither.
    """
    with open(fd, "r+b", buffering=0, closefd=False) as file:
        job = json.loads(file.read())
        file.seek(0)
        file.truncate()
        _limit(job)
        with socket.socket(fileno=parent_fd) as parent:
            for step in (_give_up_privileges, _restrict_files, _restrict_calls, _check_closed):
                try:
                    step(job)
                except OSError as error:
                    if not job["allow_unsandboxed"]:
                        parent.send(str(error).encode()[:4096])
                        return
            if (listener := job.get("listener")) is not None:
                socket.send_fds(parent, [b"\0"], [listener])
                os.close(listener)
        _run(job)
        file.write(job["secret"].encode())


def _limit(job: dict) -> None:
    limits = {
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_FSIZE: job["output_bytes"],
        resource.RLIMIT_CPU: int(job["time_s"]) + 1,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if sys.platform == "linux":
        limits[resource.RLIMIT_SIGPENDING] = 64  # a user has one budget of timers for all processes
    for limit, wanted in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limit, (value, value))


def _give_up_privileges(job: dict) -> None:
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, what="ending with the parent")
    if os.getppid() != job["parent"]:
        raise OSError("the parent is gone")
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, what="giving up privileges")
    header = struct.pack("Ii", 0x20080522, 0)
    _call("syscall", CAPSET[_machine()[0]], header, bytes(24), what="giving up capabilities")


def _machine() -> tuple[int, int]:
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise OSError(f"this is {sys.platform} on {platform.machine()}; it takes Linux on {' or '.join(MACHINES)}")
    return MACHINES[platform.machine()]


def _call(function: str, *arguments: int | bytes, what: str) -> int:
    _machine()  # the call numbers are for Linux
    values = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    result = getattr(_libc, function)(*values)
    if result < 0:
        raise OSError(f"{what} is not possible here ({os.strerror(ctypes.get_errno())})")
    return result


def _restrict_files(job: dict) -> None:
    what = "write isolation: Landlock"
    abi = _call("syscall", LANDLOCK_CREATE, 0, 0, 1, what=what)
    if abi < LANDLOCK_ABI:
        raise OSError(f"{what} of version {LANDLOCK_ABI} (Linux 6.2) is needed, and this kernel has version {abi}")
    ruleset = _call("syscall", LANDLOCK_CREATE, struct.pack("Q", EVERYTHING), 8, 0, what=what)
    readable = {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/sys/devices/system/cpu"}
    allowed = [(job["directory"], EVERYTHING & ~DEVICES), *((path, READ) for path in readable)]
    allowed += [("/dev/null", READ & 0b100 | WRITE_FILE), ("/dev/urandom", READ & 0b100)]
    for path, rights in allowed:
        if os.path.exists(path):
            beneath = os.open(path, os.O_PATH)
            _call("syscall", LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, beneath), 0, what=what)
            os.close(beneath)
    _call("syscall", LANDLOCK_RESTRICT, ruleset, 0, what=what)
    os.close(ruleset)


def _restrict_calls(job: dict) -> None:
    """Refuse or count the system calls that are listed, and allow the rest."""
    column, architecture = _machine()
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL)]
    steps += [(LOAD, 0, 0, 0), (AT_LEAST, 0, 1, X32), DENY]
    for calls, result in ((REFUSED, DENY), (MISSING, LACK), (COUNTED, COUNT)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                steps += [(EQUAL, 0, 1, number), result]
    for numbers, examination in EXAMINED.values():
        if (number := numbers[column]) is not None:
            steps += [(EQUAL, 0, len(examination) + 1, number), *examination, PASS]
    code = b"".join(struct.pack("HBBI", *step) for step in [*steps, PASS])
    held = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))
    job["listener"] = _call("syscall", SECCOMP[column], 1, 8, header, what="network isolation: a seccomp filter")


def _check_closed(job: dict) -> None:
    """Check that neither a socket can be created nor a file outside the directory be written."""
    try:
        os.close(os.open(job["outside"], os.O_WRONLY))
    except PermissionError:
        pass
    else:
        raise OSError("write isolation: Landlock is active, but a file outside was opened")
    try:
        socket.socket().close()
    except PermissionError:
        return
    raise OSError("network isolation: the seccomp filter is active, but a socket was created")


def _run(job: dict) -> None:
    name = "__main__" if job["test"] is None else "program"  # a program under test runs as if imported
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv = ["program.py"]
    for source, file in ((job["program"], "program.py"), (job["test"], "test.py")):
        if source is not None:
            exec(compile(source, file, "exec"), module.__dict__)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
